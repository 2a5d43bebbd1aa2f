"""What an experiment needs that is not on this machine, and how to get it: said before anything else happens."""

from __future__ import annotations

import importlib.util
import os
import socket
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

from ..base.files import looks_local, parse_yaml
from ..config import GPT, RANDOM, RunConfig
from ..errors import LabError
from .plan import Planned


@dataclass(frozen=True)
class Need:
    """A data set or a model: what it is, how it is got, and its size, for estimates and dry runs."""

    kind: Literal["tokens", "examples", "model"]
    what: str
    hub: str | None = None
    get: str | None = None
    rows: int | None = None
    tokens: int | None = None
    vocabulary: int = 50257


@cache
def needs() -> dict[str, Need]:
    """Every data set and local model of the shipped experiments, by name."""
    content = parse_yaml(files("oelm.lab").joinpath("data.yaml").read_text(encoding="utf-8"))
    return {name: Need(**entry) for name, entry in content.items()}


def require_all(runs: list[Planned]) -> None:
    """Raise with all that is missing for these runs, each thing once, and what to do about it."""
    lacking = dict.fromkeys(text for run in runs for text in missing(run))
    if lacking:
        advice = "Or try it first on built-in data in a minute: --scale smoke"
        raise LabError("\n".join((*lacking, advice)))


def missing(run: Planned) -> list[str]:
    """What a run needs and this machine does not have."""
    lacking = [_data(run)]
    if run.after is None:  # else model and tokenizer are those of the run before it
        lacking += [_model(run.config), _tokenizer(run.config)]
    return [f"{run.experiment.id} needs {text}" for text in lacking if text]


def _data(run: Planned) -> str | None:
    config = run.config
    path, task = config.data.path, config.task.name
    if (path or task).startswith("builtin:"):
        return None
    need = needs().get(run.experiment.data or "")
    if config.task.kind == "language":
        return _tokens(str(path), need)
    what = need.what if need else f"the examples of {task}"
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
    if hub_has(repo, "dataset"):
        return None
    return (
        f"{what}, from the Hub as {repo}, and the Hub cannot be reached from here. Download it on another machine and "
        "name its folder: --data DIR (see docs/tasks.md for the files it holds)"
    )


def _tokens(path: str, need: Need | None) -> str | None:
    folder = Path(path)
    if (folder / "data.json").is_file():
        return None
    if folder.is_dir():
        state = f"in {path}, which `oelm data prepare` did not write, or has not finished"
    else:
        state = f"as tokens in {path}, which is not there"
    if need is None:
        return f"text {state}. Prepare it with: oelm data prepare SOURCE --out {path}"
    get = f"{need.get} --out {path}"
    if need.hub is None:
        return f"{need.what}, {state}. Prepare it, or text of your own, with:\n    {get}\nElsewhere: --data DIR."
    text = f"{need.what} ({need.hub} on the Hugging Face Hub), {state}. Get it, once, with:\n    {get}\n"
    return f"{text}Your own copy: oelm data prepare FILE --tokenizer gpt2 --out DIR, and then --data DIR."


def _model(config: RunConfig) -> str | None:
    name = config.model.name
    need = needs().get(name)
    if need is not None and need.kind == "model" and not Path(name).is_dir():
        return (
            f"{need.what} in the folder {name}, which is not there. Get it, once, with:\n    {need.get}\n"
            "Another model: model.name=NAME, and its runs are a set-up of their own."
        )
    if name.startswith((GPT, RANDOM)) or Path(name).is_dir():
        return None
    if looks_local(name) or Path(name).exists():
        return f"the model {name}: there is no such folder"
    if hub_has(name, "model"):
        return None
    return (
        f"the pretrained model {name}, which is not in the cache, and the Hub cannot be reached from here. Download "
        f"its folder on another machine and name it: model.name=DIR"
    )


def _tokenizer(config: RunConfig) -> str | None:
    name = config.model.tokenizer
    if name is None or Path(name).is_dir():
        return None
    if looks_local(name) or Path(name).exists():
        return f"the tokenizer {name}: there is no such folder"
    if hub_has(name, "model"):
        return None
    return (
        f"the tokenizer {name}, which is not in the cache, and the Hub cannot be reached from here. Download its "
        "folder on another machine and name it: model.tokenizer=DIR"
    )


@cache
def hub_has(name: str, kind: Literal["model", "dataset"]) -> bool:
    """Whether something of the Hub is in this machine's cache, or the Hub can be reached to get it."""
    from huggingface_hub import constants

    return (name, kind) in _cached_repositories() or (not constants.HF_HUB_OFFLINE and _reachable(constants.ENDPOINT))


@cache
def _cached_repositories() -> set[tuple[str, str]]:
    """Return the name and kind of every repository that is in the Hub's local cache."""
    from huggingface_hub import scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    try:
        return {(repo.repo_id, repo.repo_type) for repo in scan_cache_dir().repos}
    except CacheNotFound:
        return set()


@cache
def _reachable(endpoint: str) -> bool:
    if any(os.environ.get(name) for name in ("https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY")):
        return True  # a proxy knows; a connection of ours would not
    address = urlparse(endpoint)
    try:
        with socket.create_connection((address.hostname or "", address.port or 443), timeout=3):
            return True
    except OSError:
        return False


def tokens_of(run: Planned) -> float:
    """How many tokens a run trains on, as far as can be known without its data."""
    config: Any = run.config
    length, batch = config.data.sequence_length, config.train.batch_size
    if config.task.kind == "language" and config.train.max_steps is not None:
        return float(config.train.max_steps * batch * length)
    need = needs().get(run.experiment.data or "") if run.config.data.path != "builtin:stories" else None
    rows = (need.rows if need and need.rows else 2000) * config.data.fraction
    samples = config.train.max_steps * batch if config.train.max_steps else rows * config.train.epochs
    return float(samples * min(length, need.tokens if need and need.tokens else 32))
