"""Read tasks of lm-eval from a folder of YAML files with their data beside them; nothing in it may be code.

lm-eval itself would import the Python file that a YAML file names, so these files are read here and handed on as dicts.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ..base.yaml_text import parse_yaml
from ..data.text_files import read_errors_explained
from ..errors import ConfigError

# The loaders of `datasets` that read files and run nothing.
LOADERS = ("json", "csv", "text", "parquet")
# What `dataset_kwargs` may hold: the files, and how their rows are found in them.
_DATA_OPTIONS = ("data_files", "field", "delimiter")
# Fields that lm-eval fills with Python functions or classes, and `use_prompt`, which reads further files.
_CODE_FIELDS = ("class", "custom_dataset", "process_docs", "process_results", "use_prompt", "unsafe_code")
# Options, at any depth, that let a library run code that it downloads.
_REMOTE_CODE = ("trust_remote_code", "custom_generate", "hf_evaluate")
_SUFFIXES = (".yaml", ".yml")

TaskFields = dict[str, Any]


def is_local(name: str) -> bool:
    """Return True when the name of a task means a file or folder, not one of lm-eval's tasks."""
    return "/" in name or name.endswith(_SUFFIXES) or Path(name).exists()


def read_tasks(path: Path) -> list[TaskFields]:
    """Return the tasks of a YAML file, or of all those in a folder that no other includes, checked and made absolute.

    A file's `include` is read too, and the paths of its data are relative to the file that names them.
    """
    if not path.exists():
        raise ConfigError(f"--tasks {path}: no such file or folder")
    files = [path] if path.is_file() else sorted(file for file in path.iterdir() if file.suffix in _SUFFIXES)
    if not files:
        raise ConfigError(f"--tasks {path}: holds no .yaml file; give a folder of lm-eval tasks, or the names of some")
    contents = {file: _read(file) for file in files}
    pairs = [(file.resolve(), _beside(file, name).resolve()) for file in files for name in _includes(contents[file])]
    included = {target for source, target in pairs if target != source}
    tasks: dict[str, TaskFields] = {}
    for file in files:
        if file.resolve() in included:
            continue
        task = _whole(file, ())
        _check(task, file)
        if task["task"] in tasks:
            raise ConfigError(f"{file}: a second task of the name {task['task']!r} in {path}; give it another one")
        tasks[task["task"]] = task
    if not tasks:
        raise ConfigError(f"--tasks {path}: each file is included by another; one must be a task")
    return list(tasks.values())


def _read(file: Path) -> TaskFields:
    """Return the content of a task's file; raise for one that names code, or that is no mapping."""
    with read_errors_explained(file):
        text = file.read_text(encoding="utf-8")
    try:
        _refuse_tags(text, file)
        content = parse_yaml(text)
    except ValueError as error:
        raise ConfigError(f"{file}: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: not a task: a task is a mapping with `task: NAME`")
    return content


def _refuse_tags(text: str, file: Path) -> None:
    """Raise where a YAML text has a tag of its own, such as lm-eval's `!function`, which imports Python."""
    import yaml

    try:
        for event in yaml.parse(text, Loader=yaml.SafeLoader):
            tag = getattr(event, "tag", None)
            if tag is not None and not tag.startswith("tag:yaml.org,2002:"):
                raise ConfigError(
                    f"{file}: line {event.start_mark.line + 1} has {tag}, which runs Python code; oelm runs none from "
                    "a folder of tasks. Write it as a template, or the finished text into the data"
                )
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None


def _whole(file: Path, above: tuple[Path, ...]) -> TaskFields:
    """Return a file's fields with those that it includes; its own win, and paths of data are absolute."""
    if file.resolve() in above:
        raise ConfigError(f"{file}: includes itself")
    if not file.is_file():
        raise ConfigError(f"{above[-1]}: includes {file.name}, which is not there")
    own = _read(file)
    merged: TaskFields = {}
    for name in _includes(own):
        merged |= _whole(_beside(file, name), (*above, file.resolve()))
    own.pop("include", None)
    options = own.get("dataset_kwargs")
    if isinstance(options, dict) and "data_files" in options:
        own["dataset_kwargs"] = {**options, "data_files": _absolute(options["data_files"], file)}
    return merged | own


def _includes(content: TaskFields) -> list[str]:
    value = content.get("include", [])
    return [str(name) for name in (value if isinstance(value, list) else [value])]


def _beside(file: Path, name: str) -> Path:
    return file.parent / name


def _absolute(files: Any, file: Path) -> Any:
    """Return the files of a task's data as absolute paths; raise for one that is not there, such as a URL."""
    if isinstance(files, dict):
        return {split: _absolute(part, file) for split, part in files.items()}
    if isinstance(files, list):
        return [_absolute(part, file) for part in files]
    path = _beside(file, str(files))
    if not path.is_file():
        raise ConfigError(f"{file}: dataset_kwargs.data_files: {files}: no such file beside it")
    return str(path.resolve())


def _check(task: TaskFields, file: Path) -> None:
    """Raise unless a task is one of its own, with data in files, and without code."""
    name, loader, options = task.get("task"), task.get("dataset_path"), task.get("dataset_kwargs")
    if "group" in task or not isinstance(name, str) or not name:
        raise ConfigError(f"{file}: not a task: it needs `task: NAME`; of groups, name the folder of their tasks")
    for key in _keys(task):
        if key in _REMOTE_CODE:
            raise ConfigError(f"{file}: has {key}, which runs code from elsewhere; remove it")
    for key in _CODE_FIELDS:
        if key in task:
            raise ConfigError(f"{file}: has {key}, which needs Python code; oelm runs none from a folder of tasks")
    if loader not in LOADERS or task.get("dataset_name") is not None:
        raise ConfigError(
            f"{file}: dataset_path {loader!r}: a task in a folder has its data in files: one of {', '.join(LOADERS)}"
        )
    if not isinstance(options, dict) or not options.get("data_files"):
        raise ConfigError(f"{file}: dataset_kwargs.data_files is missing: name the files of the data")
    unknown = [key for key in options if key not in _DATA_OPTIONS]
    if unknown:
        raise ConfigError(f"{file}: dataset_kwargs.{unknown[0]}: not known here; use {', '.join(_DATA_OPTIONS)}")


def _keys(value: Any) -> Iterator[str]:
    """Yield every key of a nested value."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield str(key)
            yield from _keys(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _keys(inner)
