"""The examples run as they are, offline, each in a process and an empty folder of its own."""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
_SPEC = importlib.util.spec_from_file_location("notebooks", EXAMPLES / "notebooks.py")
notebooks = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(notebooks)


def code_of(file):
    """Return a script, or the code cells of a notebook one after the other."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".py":
        return text
    return "\n\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")


def run(name, folder):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "empty"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", code_of(EXAMPLES / name)]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=170)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_family_of_ones_own(tmp_path):
    assert run("own_family.py", tmp_path).count("8 of 8 frozen tensors are bit-identical") == 2


@pytest.mark.full
def test_serving_with_the_halved_cache(tmp_path):
    assert "the cache takes 4.1 MB instead of 8.2 MB" in run("halved_cache.py", tmp_path)


@pytest.mark.full
def test_own_csv_to_a_classifier(tmp_path):
    output = run("own_csv.py", tmp_path)
    accuracy = float(output.split("accuracy ")[-1].split(";")[0])
    assert accuracy > 0.9
    assert "{'label': 'bad'" in output


@pytest.mark.full
def test_own_text_to_a_small_gpt(tmp_path):
    output = run("own_text.ipynb", tmp_path)
    assert float(output.split("perplexity ")[-1].split(" after 200 steps")[0]) < 30
    assert output.splitlines()[-1].startswith("anna has")
    assert "| validation | perplexity | " in (tmp_path / "plain-gpt" / "README.md").read_text()


@pytest.mark.full
def test_files_of_ones_own_are_used_and_kept(tmp_path):
    text, rows = tmp_path / "mine.txt", tmp_path / "reviews" / "train.csv"
    text.write_text("<|endoftext|>".join(f"text number {n} is about {n} owls. " * 5 for n in range(2000)))
    rows.parent.mkdir()
    rows.write_text("review,stars\n" + "".join(f"good film {n},five\ndull film {n},one\n" for n in range(200)))
    before = text.read_bytes(), rows.read_bytes()
    assert "owls" in run("own_text.py", tmp_path).splitlines()[-1]
    assert "{'label': '" in run("own_csv.py", tmp_path)
    assert (text.read_bytes(), rows.read_bytes()) == before
    assert [path.name for path in rows.parent.iterdir()] == ["train.csv"]


@pytest.mark.full
def test_hugging_faces_trainer_goes_on_from_its_checkpoint(tmp_path):
    """The model is built anew, with other random weights; the second call of the same cell has no first 100 steps."""
    output = run("huggingface_trainer.ipynb", tmp_path)
    accuracy, _, rest = output.split("accuracy ")[-1].partition("; ")
    assert float(accuracy) > 0.9
    assert rest.startswith("last checkpoint trainer/checkpoint-400\n")
    assert "8 of 8 frozen tensors are bit-identical to the sealed ones" in output
    assert (tmp_path / "plain" / "README.md").is_file()
    script = run("huggingface_trainer.py", tmp_path)
    assert "8 of 8 frozen tensors are bit-identical" in script, "in another process, from the last checkpoint"
    assert f"accuracy {accuracy}; last checkpoint trainer/checkpoint-400\n" in script, "no step more than 400"


@pytest.mark.parametrize("name", notebooks.SCRIPTS)
def test_a_notebook_holds_its_script(name):
    script = (EXAMPLES / name).read_text(encoding="utf-8")
    file = (EXAMPLES / name).with_suffix(".ipynb")
    assert json.loads(file.read_text(encoding="utf-8")) == notebooks.notebook(script), "run examples/notebooks.py"


def test_the_list_of_examples_is_complete():
    text = (EXAMPLES / "README.md").read_text(encoding="utf-8")
    for file in EXAMPLES.iterdir():
        assert f"({file.name})" in text or file.name in ("README.md", "notebooks.py"), file.name
