"""What the shell offers when Tab is pressed: presets, experiments, models, families, tasks, settings and runs.

Every function gets the word typed so far and returns those that begin with it, with a line about each where there is
one. They import nothing heavy, since they run at every Tab.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import typer

_Offers = list[tuple[str, str]]
# The folder in which runs are kept unless --out names another.
RUNS = Path("runs")
# Characters at which bash ends a word.
_BREAKS = ("=", ":")
# The sizes of the project's GPT; the table that has them imports torch.
SIZES = ("tiny", "small", "medium-512", "medium", "large")


def presets(incomplete: str) -> _Offers:
    """Offer the presets."""
    from ..method.presets import ABOUT

    return _beginning(incomplete, ABOUT.items())


def experiments(incomplete: str) -> _Offers:
    """Offer the experiments; a file of one's own is left to the shell."""
    from ..lab.experiment import runnable_experiments

    return _beginning(incomplete, ((experiment.id, experiment.asks) for experiment in runnable_experiments()))


def experiments_and_settings(incomplete: str) -> _Offers:
    """Offer the experiments, and the settings that may follow them."""
    return experiments(incomplete) + settings(incomplete)


def models(incomplete: str) -> _Offers:
    """Offer the project's GPTs and the small random models of every family."""
    from ..config import GPT, RANDOM
    from ..method.families import known_types

    sizes = [*SIZES, *(f"modern-{size}" for size in SIZES)]
    names = [*(f"{GPT}{size}" for size in sizes), *(f"{RANDOM}{family}" for family in known_types())]
    return _beginning(incomplete, ((name, "") for name in names))


def tasks(incomplete: str) -> _Offers:
    """Offer the labelled tasks."""
    from ..data.labelled.tasks import NAMES

    return _beginning(incomplete, ((name, "") for name in NAMES))


def abilities(incomplete: str) -> _Offers:
    """Offer the tasks of `oelm probe`."""
    from ..lab.probes import TASKS

    return _beginning(incomplete, TASKS.items())


def languages(incomplete: str) -> _Offers:
    """Offer the languages of a report."""
    return _beginning(incomplete, (("en", "English"), ("zh", "中文")))


def settings(incomplete: str) -> _Offers:
    """Offer the settings of a run as KEY=, and the presets as method=NAME."""
    if _before_break().endswith(":"):  # bash has cut an option's value, or a task, in two
        return models(incomplete) + tasks(incomplete)
    from pydantic import BaseModel

    from ..config import RunConfig
    from ..method.presets import ABOUT

    keys = []
    for name, field in RunConfig.model_fields.items():
        section = field.annotation
        if name != "method" and isinstance(section, type) and issubclass(section, BaseModel):
            keys += [f"{name}.{inner}=" for inner in section.model_fields]
        elif name != "method":
            keys.append(f"{name}=")
    methods = [(f"method={name}", about) for name, about in ABOUT.items()]
    return _beginning(incomplete, [*methods, *((key, "") for key in keys)])


def runs(ctx: typer.Context, incomplete: str) -> _Offers:
    """Offer the folders of the runs in --out, or in the folder that is being typed."""
    from ..lab.status import run_folders

    typed = Path(incomplete)
    above = typed if typed.is_dir() else typed.parent
    typing_a_path = incomplete.strip("./") and above.is_dir() and above != Path()
    root = above if typing_a_path else Path(ctx.params.get("out") or RUNS)
    return _beginning(incomplete, ((str(folder), "") for folder in run_folders(root)) if root.is_dir() else ())


def _beginning(incomplete: str, offers: Iterable[tuple[str, str]]) -> _Offers:
    """Return the offers that begin with the word; where bash has cut the word in two, what follows the cut."""
    start = _before_break()
    word = start + ("" if incomplete in _BREAKS else incomplete)
    return [(name.removeprefix(start), about) for name, about in offers if name.startswith(word)]


def _before_break() -> str:
    """Return the part of a word that bash takes for words of their own, such as "method=", or an empty string."""
    words, position = os.environ.get("COMP_WORDS", "").split(), int(os.environ.get("COMP_CWORD") or 0)
    before = words[:position]
    current = words[position] if position < len(words) else ""
    if current in _BREAKS and before:
        return before[-1] + current
    return "".join(before[-2:]) if len(before) > 1 and before[-1] in _BREAKS else ""
