"""Damaged files of a tokenizer end in one line, or change nothing that they should not: never in a traceback."""

import json
import random
import shutil
from collections import Counter

import pytest
from typer.testing import CliRunner

from oelm.cli.app import app
from tests.support.damage import VALUES, places_in
from tests.support.training import config, run_here, tiny, token_folder, write_yaml

CHANGES = {"train": {"max_steps": 1}, "eval": {"every": 1}}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Return a model's folder with its tokenizer."""
    root = tmp_path_factory.mktemp("exported")
    run_here(root, **CHANGES)
    result = CliRunner().invoke(app, ["export", str(config(root, **CHANGES).folder), str(root / "model")])
    assert result.exit_code == 0, result.output
    return root / "model"


def damaged(text: str, randomness: random.Random) -> str:
    """Return a JSON document that was cut, or that lost or got another value, near its top more often than below."""
    content = json.loads(text)
    if randomness.random() < 0.2:
        return text[: randomness.randrange(len(text))]
    places = [place for place in places_in(content) if len(place) < 4 or randomness.random() < 0.05]
    *above, last = randomness.choice(places)
    node = content
    for key in above:
        node = node[key]
    if randomness.random() < 0.3:
        del node[last]
    else:
        node[last] = randomness.choice(VALUES)
    return json.dumps(content)


@pytest.mark.parametrize("command", ["generate", "train", "prepare"])
def test_damaged_tokenizers_end_in_one_line(command, exported, rounds, tmp_path):
    randomness, outcomes = random.Random(f"tokenizers {command}"), Counter()
    tokens = shutil.copytree(token_folder(), tmp_path / "tokens")
    folder = tokens / "tokenizer" if command == "train" else shutil.copytree(exported, tmp_path / "model")
    (tmp_path / "text.txt").write_text("Once upon a time there was a cat.\n\n" * 200)
    prepare = ["data", "prepare", str(tmp_path / "text.txt"), "--val-fraction", "0"]
    names = [name for name in ("tokenizer.json", "tokenizer_config.json") if (folder / name).is_file()]
    for number in range(-1, rounds(8)):
        file = folder / randomness.choice(names)
        before = file.read_text()
        if number >= 0:  # at first the files are as they were written, which must do
            file.write_text(damaged(before, randomness))
        fields = tiny(tmp_path / f"runs-{number}", data={"path": str(tokens)}, **CHANGES)
        arguments = {
            "generate": ["generate", str(folder), "--prompt", "Once", "--tokens", "2"],
            "train": ["train", str(write_yaml(tmp_path / "run.yaml", fields))],
            "prepare": [*prepare, "--out", str(tmp_path / f"data-{number}"), "--tokenizer", str(folder)],
        }
        result = CliRunner().invoke(app, arguments[command])
        assert result.exception is None or isinstance(result.exception, SystemExit), f"{file}: {result.exception!r}"
        if result.exit_code:
            assert number >= 0, result.output
            assert result.exit_code == 2, result.output
            assert len([line for line in result.stderr.splitlines() if line.startswith("oelm: ")]) == 1, result.output
        outcomes["refused" if result.exit_code else "no effect"] += 1
        file.write_text(before)
    print(f"{command}: {dict(outcomes)}")
