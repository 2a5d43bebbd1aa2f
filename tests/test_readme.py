"""The documentation: its Python examples run offline, and its tables are complete."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer
import yaml

import oelm
from oelm.cli.app import app
from oelm.config import RunConfig
from oelm.method import families
from oelm.method.spec import PRESETS, Method, Projection

ROOT = Path(__file__).parents[1]
DOCUMENTS = sorted(ROOT.glob("docs/*.md"))


def python_in(document: Path) -> str:
    """Return all Python blocks of a document as one script: later blocks use what earlier ones define."""
    return "\n".join(
        re.findall(r"^```python\n(.*?)^```$", document.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    )


def test_the_readme_example_runs_offline(tmp_path):
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "empty"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", python_in(ROOT / "README.md")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "BertModel: oelm-freeze, seed 0" in done.stdout
    assert "12.9% of the model" in done.stdout, "as the comment in the example says"
    assert "48 of 48 frozen tensors are bit-identical to the sealed ones" in done.stdout


def test_the_readme_begins_with_a_command_and_an_example():
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    assert lines.index("```") < 15
    assert lines.index("```python") < 15


def test_the_chinese_readme_has_the_same_example():
    english, chinese = (python_in(ROOT / name) for name in ("README.md", "README.zh-CN.md"))
    assert ast.dump(ast.parse(english)) == ast.dump(ast.parse(chinese))


def test_the_guides_have_examples():
    assert {document.stem for document in DOCUMENTS if python_in(document)} >= {
        "data",
        "methods",
        "models",
        "proof",
        "tasks",
    }


@pytest.mark.parametrize(
    "document", [document for document in DOCUMENTS if python_in(document)], ids=lambda path: path.name
)
def test_the_examples_of_a_guide_run(document, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(families, "_FAMILIES", dict(families._FAMILIES))  # an example may register a family
    exec(compile(python_in(document), document.name, "exec"), {"__name__": document.stem})


def test_every_preset_init_and_field_is_described():
    text = (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")
    inits = Projection.model_fields["init"].annotation.__args__
    for name in (*PRESETS, *inits, *Method.model_fields):
        assert f"`{name}`" in text, name


def test_every_command_is_listed():
    text = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^oelm (\w+)", text, re.MULTILINE))
    assert listed == set(typer.main.get_command(app).commands)


def test_every_family_is_in_the_table():
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    table = [line for line in text.splitlines() if line.startswith("|")][2:]
    listed = {name for line in table for name in re.findall(r"`([^`]+)`", line.split("|")[1])}
    assert listed == set(families.known_types())


def test_every_section_of_a_config_is_in_the_table():
    text = (ROOT / "docs" / "training.md").read_text(encoding="utf-8").split("## The config")[1].split("## ")[0]
    listed = {name for line in text.splitlines() if line.startswith("|") for name in re.findall(r"`(\w+)`", line)}
    assert set(RunConfig.model_fields) <= listed


def test_files_that_the_documents_link_to_exist():
    for document in (*ROOT.glob("*.md"), ROOT / "examples" / "README.md", *DOCUMENTS):
        text = document.read_text(encoding="utf-8")
        for link in re.findall(r"\]\(<?([^)#:>]+)>?\)", text):
            assert (document.parent / link).exists(), f"{document.name}: {link}"


def test_the_map_of_the_code_has_every_folder():
    """One line per folder of src/oelm, and the modules beside them."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Map of the code")[1].split("## ")[0]
    rows = re.findall(r"^\| ((?:`[\w./]+`(?:, )?)+) \|", text, re.MULTILINE)
    listed = {name.rstrip("/") for row in rows for name in re.findall(r"`([^`]+)`", row)} - {"src/oelm"}
    entries = {path.name for path in (ROOT / "src" / "oelm").iterdir() if path.is_dir() or path.suffix == ".py"}
    assert listed == entries - {"__pycache__", "__main__.py"}


def test_the_citation_is_valid_and_of_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert set(citation) >= {"cff-version", "message", "title", "authors"}, "what CFF 1.2 requires"
    assert citation["cff-version"] == "1.2.0"
    assert all("name" in author or "family-names" in author for author in citation["authors"])
    assert citation["version"] == oelm.__version__
    assert citation["license"] == "Apache-2.0"


def test_the_workflow_runs_the_gate():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "gate.yml").read_text(encoding="utf-8"))
    commands = [step.get("run") for step in workflow["jobs"]["gate"]["steps"]]
    assert ".ci/run" in commands
    assert os.access(ROOT / ".ci" / "run", os.X_OK)
