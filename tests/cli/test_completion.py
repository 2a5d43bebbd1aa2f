"""Completion in the shell: what is offered for a word, also where bash cuts the word at a colon or an equals sign."""

import os
import subprocess
import sys

import pytest

from oelm.cli import completion
from oelm.models.gpt_config import SIZES
from tests.support.records import language_run
from tests.test_import import loaded_modules

SCRIPT = "import sys; sys.argv[0] = 'oelm'; from oelm.cli import main; main()"


def offers(folder, *words):
    """Return what bash is offered for the last of the words."""
    words = ("oelm", *words)
    variables = {"_OELM_COMPLETE": "complete_bash", "COMP_WORDS": "\n".join(words), "COMP_CWORD": str(len(words) - 1)}
    command = [sys.executable, "-c", SCRIPT]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **variables}, cwd=folder, timeout=60
    )
    assert done.stderr == ""
    return done.stdout.split()


@pytest.mark.full
def test_bash_is_offered_the_names_that_fit_the_place(tmp_path):
    run = language_run(tmp_path / "runs").relative_to(tmp_path)
    for words, expected in (
        (("diagnose", "random:bert", "--method", "oelm-f"), ["oelm-freeze", "oelm-ffn"]),
        (("matrix", "GPT-0"), [f"GPT-0{n}" for n in range(1, 8)]),
        (("train", "run.yaml", "train.max"), ["train.max_steps="]),
        (("train", "run.yaml", "method", "=", "oelm-f"), ["oelm-freeze", "oelm-ffn"]),
        (("train", "--model", "gpt", ":", "ti"), ["tiny"]),
        (("train", "--model", "random", ":", "modern"), ["modernbert"]),
        (("finetune", "ss"), ["sst2"]),
        (("finetune", "builtin", ":", "se"), ["sentiment"]),
        (("report", "runs", "--lang", "z"), ["zh"]),
        (("eval", "runs/"), [str(run)]),
        (("compare", str(run), ""), [str(run)]),
    ):
        assert offers(tmp_path, *words) == expected, words


def test_bash_is_offered_the_runs_in_the_default_folder(tmp_path):
    run = language_run(tmp_path / "runs").relative_to(tmp_path)
    assert offers(tmp_path, "eval", "") == [str(run)]


def test_other_shells_are_offered_whole_words():
    assert [name for name, _ in completion.settings("method=oelm-f")] == ["method=oelm-freeze", "method=oelm-ffn"]
    assert ("oelm-freeze", completion.presets("oelm-fr")[0][1]) in completion.presets("")
    assert [name for name, _ in completion.models("random:be")] == ["random:bert"]


def test_every_size_of_the_gpt_is_offered():
    assert set(completion.SIZES) == set(SIZES)


def test_completion_loads_nothing_heavy():
    code = "from oelm.cli import completion as c; c.presets(''); c.experiments(''); c.models(''); c.tasks('')"
    assert not loaded_modules(f"{code}; c.settings('')") & {"torch", "transformers"}
