"""Check, before anything is started, that this machine has what the runs need; say how to get what is missing."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Literal

from ..base.files import looks_local
from ..base.hub import hub_answers
from ..base.yaml_text import parse_yaml
from ..config import GPT, RANDOM
from ..errors import LabError
from .plan import PlannedRun

# The length of a labelled task's data where `data.yaml` does not give it: about that of the built-in data.
_ROWS, _TOKENS_PER_ROW = 2000, 32


@dataclass(frozen=True, kw_only=True)
class Requirement:
    """A dataset or a model that an experiment needs: an entry of `data.yaml`.

    what                a description for the user
    hub, get            its name on the Hub, and the command that gets it
    rows, tokens        training examples, and tokens in each, for estimates
    vocabulary          the vocabulary of its tokens, for dry runs
    """

    kind: Literal["tokens", "examples", "model"]
    what: str
    hub: str | None = None
    get: str | None = None
    rows: int | None = None
    tokens: int | None = None
    vocabulary: int = 50257


@cache
def known_requirements() -> dict[str, Requirement]:
    """Return every dataset and local model of the shipped experiments, by name."""
    content = parse_yaml(files("oelm.lab").joinpath("data.yaml").read_text(encoding="utf-8"))
    return {name: Requirement(**entry) for name, entry in content.items()}


def require_available(runs: list[PlannedRun]) -> None:
    """Raise if anything is missing for these runs; the message lists each missing thing once and how to get it."""
    problems = dict.fromkeys(text for run in runs for text in missing(run))
    if problems:
        raise LabError("\n".join((*problems, "Or try it first on built-in data in a minute: --scale smoke")))


def missing(run: PlannedRun) -> list[str]:
    """Return a sentence for everything that a run needs and this machine does not have."""
    problems = [_missing_data(run)]
    if run.starts_from is None:  # otherwise model and tokenizer come from the run that it starts from
        problems.append(_missing_model(run.config.model.name))
        if run.config.model.tokenizer is not None:
            problems.append(_missing_from_hub("tokenizer", run.config.model.tokenizer, "model.tokenizer"))
    return [f"{run.experiment.id} needs {text}" for text in problems if text]


def _missing_data(run: PlannedRun) -> str | None:
    config = run.config
    path, task = config.data.path, config.task.name
    if (path or task).startswith("builtin:") or config.task.kind == "generated":
        return None
    requirement = known_requirements().get(run.experiment.data or "")
    if config.task.kind in ("language", "masked-language"):
        return _missing_tokens(str(path), requirement)
    what = requirement.what if requirement else f"the examples of {task}"
    if path is not None:
        return None if Path(path).is_dir() else f"{what} in {path}: there is no such folder"
    from ..data.labelled.tasks import TASKS

    if task not in TASKS:
        return f"{what}: name their folder with --data DIR"
    repo = TASKS[task].repo
    if importlib.util.find_spec("datasets") is None:
        return (
            f"{what}. From the Hub ({repo}): pip install 'oelm[data]', and it is downloaded when the run starts. From "
            "local files: --data DIR"
        )
    if available_from_hub(repo, "dataset"):
        return None
    return (
        f"{what}, from the Hub as {repo}, and the Hub cannot be reached from here. Download it on another machine and "
        "name its folder: --data DIR (see docs/tasks.md for the files it holds)"
    )


def _missing_tokens(path: str, requirement: Requirement | None) -> str | None:
    folder = Path(path)
    if (folder / "data.json").is_file():
        return None
    if folder.is_dir():
        state = f"in {path}, which `oelm data prepare` did not write, or has not finished"
    else:
        state = f"as tokens in {path}, which is not there"
    if requirement is None:
        return f"text {state}. Prepare it with: oelm data prepare SOURCE --train-bpe 8192 --out {path}"
    what, command = requirement.what, f"{requirement.get} --out {path}"
    if requirement.hub is None:
        text = f"{what}, {state}. Prepare it, or text of your own, with:\n    {command}\n"
        return f"{text}If it is in another folder: --data DIR."
    text = f"{what} ({requirement.hub} on the Hugging Face Hub), {state}. Get it, once, with:\n    {command}\n"
    return f"{text}Your own copy: oelm data prepare FILE --tokenizer gpt2 --out DIR, and then --data DIR."


def _missing_model(name: str) -> str | None:
    requirement = known_requirements().get(name)
    if requirement is not None and requirement.kind == "model" and not Path(name).is_dir():
        return (
            f"{requirement.what} in the folder {name}, which is not there. Get it, once, with:\n    {requirement.get}\n"
            "To use another model: model.name=NAME; its runs then form a setup of their own."
        )
    if name.startswith((GPT, RANDOM)):
        return None
    return _missing_from_hub("model", name, "model.name")


def _missing_from_hub(what: Literal["model", "tokenizer"], name: str, field: str) -> str | None:
    """Return what is missing if a model or tokenizer, a local folder or a name on the Hub, is not available."""
    if Path(name).is_dir():
        return None
    if looks_local(name) or Path(name).exists():
        return f"the {what} {name}: there is no such folder"
    if available_from_hub(name, "model"):
        return None
    kind = "pretrained model" if what == "model" else what
    return (
        f"the {kind} {name}, which is not in the cache, and the Hub cannot be reached from here. Download its folder "
        f"on another machine and name it: {field}=DIR"
    )


@cache
def available_from_hub(name: str, kind: Literal["model", "dataset"]) -> bool:
    """Return True when a repository of the Hub is in this machine's cache, or the Hub can be reached to get it."""
    from huggingface_hub import constants

    if (name, kind) in _cached_repositories():
        return True
    return not constants.is_offline_mode() and hub_answers(constants.ENDPOINT)


@cache
def _cached_repositories() -> set[tuple[str, str]]:
    """Return the name and kind of every repository that is in the Hub's local cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return {(repo.repo_id, repo.repo_type) for repo in scan_cache_dir().repos}
    except CacheNotFound:
        return set()


def training_tokens(run: PlannedRun) -> float:
    """Return how many tokens a run trains on, as far as that is known without its data."""
    config = run.config
    train, length = config.train, config.data.sequence_length
    if config.task.kind in ("language", "masked-language", "generated") and train.max_steps is not None:
        return float(train.max_steps * train.batch_size * length)
    requirement = known_requirements().get(run.experiment.data or "")
    if config.data.path == "builtin:stories":
        requirement = None
    rows = ((requirement and requirement.rows) or _ROWS) * config.data.fraction
    samples = train.max_steps * train.batch_size if train.max_steps else rows * (train.epochs or 0)
    return float(samples * min(length, (requirement and requirement.tokens) or _TOKENS_PER_ROW))
