"""Tasks of lm-eval in a folder: what is read, and what is refused because it could be code."""

import pytest
import yaml

from oelm.errors import ConfigError
from oelm.evaluation.task_files import is_local, read_tasks

CHOICE = {
    "task": "choice",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": "data.jsonl"},
    "test_split": "train",
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "gold",
}


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "data.jsonl").write_text('{"question": "a", "choices": ["b", "c"], "gold": 0}\n')
    return tmp_path


def write(folder, name="choice.yaml", **changes):
    (folder / name).write_text(yaml.safe_dump({**CHOICE, **changes}))
    return folder


def test_a_folders_tasks_have_the_paths_of_their_data_and_what_they_include(folder):
    write(folder, "base.yaml")
    (folder / "more.yaml").write_text("include: base.yaml\ntask: more\ndoc_to_text: '{{question}}?'\n")
    (folder / "other.yml").write_text("include: [base.yaml]\ntask: other\n")
    (folder / "notes.txt").write_text("no task")
    more, other = read_tasks(folder)
    assert (more["task"], other["task"]) == ("more", "other"), "a file that others include is no task of its own"
    assert more["doc_to_text"] == "{{question}}?"
    assert other["doc_to_text"] == "{{question}}"
    for task in (more, other):
        assert task["dataset_kwargs"]["data_files"] == str(folder / "data.jsonl")
        assert "include" not in task
    assert [task["task"] for task in read_tasks(folder / "base.yaml")] == ["choice"]


def test_data_of_several_splits_and_files_are_found(folder):
    (folder / "more.jsonl").write_text("{}\n")
    write(folder, dataset_kwargs={"data_files": {"train": ["data.jsonl", "more.jsonl"], "test": "data.jsonl"}})
    files = read_tasks(folder)[0]["dataset_kwargs"]["data_files"]
    one, two = (str(folder / name) for name in ("data.jsonl", "more.jsonl"))
    assert files == {"train": [one, two], "test": one}


@pytest.mark.parametrize("line", ["doc_to_text: !function code.ask", "filter_list:\n  - [!function code.ask]"])
def test_a_function_is_refused_by_name_and_its_file_is_not_imported(folder, line):
    (folder / "code.py").write_text(f"open({str(folder / 'ran')!r}, 'w')\ndef ask(doc): return ''\n")
    fields = {key: value for key, value in CHOICE.items() if key != "doc_to_text"}
    (folder / "choice.yaml").write_text(yaml.safe_dump(fields) + line + "\n")
    with pytest.raises(ConfigError, match=r"choice\.yaml: line \d+ has !function, which runs Python code"):
        read_tasks(folder)
    (folder / "included.yaml").write_text(f"{line}\n")
    write(folder, include="included.yaml")
    with pytest.raises(ConfigError, match=r"included\.yaml: line \d+ has !function"):
        read_tasks(folder / "choice.yaml")
    assert not (folder / "ran").exists()


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dataset_kwargs": {"data_files": "data.jsonl", "trust_remote_code": True}}, "has trust_remote_code"),
        ({"generation_kwargs": {"custom_generate": "some/code"}}, "has custom_generate"),
        ({"metric_list": [{"metric": "acc", "hf_evaluate": True}]}, "has hf_evaluate"),
        ({"class": "code.Task"}, "has class, which needs Python code"),
        ({"process_docs": "code.docs"}, "has process_docs, which needs Python code"),
        ({"use_prompt": "prompts.yaml:one"}, "has use_prompt"),
        ({"dataset_path": "allenai/ai2_arc"}, "dataset_path 'allenai/ai2_arc': .* one of json, csv, text, parquet"),
        ({"dataset_path": "./script.py"}, r"dataset_path './script\.py'"),
        ({"dataset_path": "pandas"}, "dataset_path 'pandas'"),
        ({"dataset_name": "easy"}, "dataset_path 'json'"),
        ({"dataset_kwargs": {}}, "data_files is missing"),
        ({"dataset_kwargs": {"data_files": "https://example.org/data.jsonl"}}, "https:.*no such file beside it"),
        ({"dataset_kwargs": {"data_files": "data.jsonl", "data_dir": "."}}, "data_dir: not known here"),
        ({"task": ["one", "two"]}, "needs `task: NAME`"),
        ({"group": "many"}, "needs `task: NAME`"),
        ({"include": "gone.yaml"}, r"includes gone\.yaml, which is not there"),
        ({"include": "choice.yaml"}, "includes itself"),
    ],
)
def test_what_could_run_code_or_has_no_data_is_refused(folder, changes, problem):
    write(folder, **changes)
    with pytest.raises(ConfigError, match=rf"choice\.yaml: .*{problem}"):
        read_tasks(folder / "choice.yaml")


def test_folders_without_tasks_and_equal_names_are_refused(folder):
    with pytest.raises(ConfigError, match=r"holds no \.yaml file"):
        read_tasks(folder)
    with pytest.raises(ConfigError, match="no such file or folder"):
        read_tasks(folder / "gone")
    (folder / "list.yaml").write_text("- a\n")
    with pytest.raises(ConfigError, match=r"list\.yaml: not a task"):
        read_tasks(folder)
    (folder / "list.yaml").unlink()
    write(folder, "one.yaml", include="two.yaml")
    write(folder, "two.yaml", include="one.yaml")
    with pytest.raises(ConfigError, match="each file is included by another"):
        read_tasks(folder)
    for name in ("one.yaml", "two.yaml", "choice.yaml", "again.yaml"):
        write(folder, name)
    with pytest.raises(ConfigError, match="a second task of the name 'choice'"):
        read_tasks(folder)


def test_a_name_is_a_path_when_it_looks_like_one_or_is_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()
    assert all(map(is_local, ["mine", "a/b", "task.yaml", "./x"]))
    assert not is_local("hellaswag")
