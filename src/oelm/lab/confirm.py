"""The runs of a plan's confirmation: exactly those that it names, checked against what it says about them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ..base.yaml_text import parse_yaml
from ..config import WITHOUT_EFFECT, parse_override
from ..data.corpus.header import HEADER, read_header
from ..errors import FileError, LabError, nearest
from ..runs.confirmation import (
    TOKENS_TOLERANCE,
    ConfirmationRuns,
    PlannedHypothesis,
    Study,
    arm_name,
    is_plan,
    load_plan,
    run_name,
)
from ..runs.schema import Environment, read_optional
from .experiment import Experiment, find_experiment
from .plan import PlannedRun, Request, plan_runs
from .preflight import training_tokens

_FILES = (".yaml", ".yml", ".json")
# Fewer pairs, or seeds of an arm, have no interval.
_FEWEST = 2


def named_plan(names: Sequence[str]) -> Path | None:
    """Return the plan among the names that a matrix is given, or None; raise where it is given with anything else."""
    plans = [name for name in names if name.endswith(_FILES) and holds_plan(Path(name))]
    if not plans:
        return None
    if len(names) > 1:
        others = ", ".join(name for name in names if name != plans[0])
        raise LabError(f"{plans[0]}: a plan says itself what is run; run {others or 'it'} by another command")
    return Path(plans[0])


def load_study(path: Path) -> Study:
    """Load a plan and the config of every run of its confirmation; raise where it names something that is not there."""
    plan, confirmation, sha256 = load_plan(path)
    try:
        runs = _runs(path, confirmation.runs, Request())
        configs = {run_name(run.config): run.config for run in runs}
        study = Study(path=path, sha256=sha256, confirmation=confirmation, configs=configs, shown=plan.shown)
        for hypothesis in confirmation.hypotheses:
            _check(hypothesis, study)
        for group in plan.shown:
            for arm in group.names:
                _require_arm(f"shown, {group.title}", arm, study)
        _check_tokens(study, runs)
    except LabError as error:
        raise LabError(f"{path}: {error}") from None
    return study


def plan_study(study: Study, request: Request) -> list[PlannedRun]:
    """Return the runs of a plan, each with the plan's mark; smoke runs only rehearse them and have none."""
    _refuse_changes(study, request)
    try:
        runs = _runs(study.path, study.confirmation.runs, request)
    except LabError as error:
        raise LabError(f"{study.path}: {error}") from None
    if request.scale == "smoke":
        return runs
    if study.confirmation.judges == "test":
        _require_test_text(study, runs)
    return [_marked(run, study) for run in runs]


def experiment_files(path: Path) -> list[Path]:
    """Return the files of experiments that a plan names, which lie beside it; raise where the plan is not valid."""
    entries = load_study(path).confirmation.runs
    names = dict.fromkeys(entry.experiment for entry in entries if entry.experiment.endswith(_FILES))
    return [_beside(path, name) for name in names]


def made_otherwise(study: Study, runs: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Return the runs whose folders hold one that was begun before the plan, or under another version of it."""
    return [run for run in runs if run.config.log.plan is not None and _begun_otherwise(run, study)]


def _begun_otherwise(run: PlannedRun, study: Study) -> bool:
    folder = run.folder
    begun = (folder / "result.json").is_file() or any((folder / "checkpoints").glob("*"))
    if not begun:
        return False
    try:
        recorded = read_optional(folder / "environment.json", Environment)
    except FileError:  # the matrix and the report name the damaged record
        return True
    return recorded is None or recorded.plan is None or recorded.plan.sha256 != study.sha256


def holds_plan(path: Path) -> bool:
    """Return True for the file of a plan; what is wrong with any other file is said by who reads it."""
    try:
        return is_plan(parse_yaml(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return False


def _runs(path: Path, entries: Sequence[ConfirmationRuns], request: Request) -> list[PlannedRun]:
    """Return the runs of all entries, each once; seeds are the outermost loop, as in every matrix."""
    planned: list[tuple[tuple[int, int, int, int], PlannedRun]] = []
    for number, entry in enumerate(entries):
        runs = plan_runs([_experiment(path, entry.experiment)], replace(request, seeds=entry.seed_list))
        for run in _with_methods(entry, runs):
            seed, combination, _, method = run.order
            planned.append(((seed, combination, number, method), run))
    by_folder: dict[Path, PlannedRun] = {}
    for _, run in sorted(planned, key=lambda item: item[0]):
        other = by_folder.setdefault(run.folder, run)
        if other.config.id != run.config.id:
            raise LabError(f"two entries of runs both have a run {run.name}, and the two differ")
    return list(by_folder.values())


def _experiment(path: Path, name: str) -> Experiment:
    return find_experiment(str(_beside(path, name)) if name.endswith(_FILES) else name)


def _beside(path: Path, name: str) -> Path:
    if Path(name).name != name:
        raise LabError(f"experiment {name}: give the name of a file in the folder of the plan")
    return path.parent / name


def _with_methods(entry: ConfirmationRuns, runs: list[PlannedRun]) -> list[PlannedRun]:
    """Return the runs of an entry's methods, and those that these start from."""
    if entry.methods is None:
        return runs
    known = list(dict.fromkeys(run.folder.parent.name for run in runs if run.experiment.id == runs[-1].experiment.id))
    for method in entry.methods:
        if method not in known:
            raise LabError(
                f"experiment {entry.experiment} has no method {method!r}.{nearest(method, known)} Its methods, as run "
                f"folders name them: {', '.join(known)}"
            )
    chosen = [run for run in runs if run.folder.parent.name in entry.methods]
    needed = {run.starts_from.folder for run in chosen if run.starts_from is not None}
    return [run for run in runs if run in chosen or run.folder in needed]


def _check(hypothesis: PlannedHypothesis, study: Study) -> None:
    """Raise where a hypothesis names an arm that is not run, is not about perplexity, or could never be tested."""
    where = f"hypothesis {hypothesis.id}"
    for field, arm in (("arm", hypothesis.arm), ("against", hypothesis.against)):
        _require_arm(f"{where}: {field}", arm, study)
        config = next(config for config in study.configs.values() if arm_name(config) == arm)
        if config.task.kind != "language":
            raise LabError(f"{where}: {field} {arm} has no perplexity: its task is {config.task.name}")
    seeds = [set(study.seeds(arm)) for arm in (hypothesis.arm, hypothesis.against)]
    if hypothesis.test == "paired" and len(seeds[0] & seeds[1]) < _FEWEST:
        raise LabError(f"{where}: a paired test needs {_FEWEST} seeds or more that both arms have")
    if min(map(len, seeds)) < _FEWEST:
        raise LabError(f"{where}: a test needs {_FEWEST} seeds or more of each arm")


def _require_arm(where: str, arm: str, study: Study) -> None:
    """Raise where a plan names an arm that it does not run."""
    arms = list(study.arms())
    if arm not in arms:
        raise LabError(f"{where} {arm!r} is not among the runs.{nearest(arm, arms)} Arms: {', '.join(arms)}")


def _check_tokens(study: Study, runs: Sequence[PlannedRun]) -> None:
    """Raise where the arms of a hypothesis are trained on another number of tokens than the plan says."""
    tokens = study.confirmation.tokens
    if isinstance(tokens, str):
        return
    judged = {arm for hypothesis in study.confirmation.hypotheses for arm in (hypothesis.arm, hypothesis.against)}
    for run in runs:
        own = training_tokens(run)
        known = run.config.train.max_steps is not None  # how many tokens some epochs are is known with the data alone
        if known and arm_name(run.config) in judged and abs(own - tokens) > TOKENS_TOLERANCE * tokens:
            raise LabError(f"tokens is {tokens:,.0f}, but {run.name} is trained on {own:,.0f}")


def _require_test_text(study: Study, runs: Sequence[PlannedRun]) -> None:
    """Raise where the data of the runs is here, or built in, and has no test text to judge them on."""
    for path in dict.fromkeys(run.config.data.path for run in runs if run.config.task.kind == "language"):
        if path is None or not (path.startswith("builtin:") or (Path(path) / HEADER).is_file()):
            continue
        if path.startswith("builtin:") or "test" not in read_header(Path(path)).splits:
            raise LabError(
                f"{study.path}: judges is test, but {path} has no test text; prepare the data again, with "
                "`oelm data prepare SOURCE --test FILE`"
            )


def _refuse_changes(study: Study, request: Request) -> None:
    """Raise where the command line would change what the plan says."""
    fixed = [text for text in request.overrides if parse_override(text)[0].partition(".")[0] not in WITHOUT_EFFECT]
    changes = [*(["--seeds"] if request.seeds is not None else []), *request.axes, *fixed]
    if changes:
        raise LabError(f"{study.path}: the plan says what is run; {', '.join(changes)} would change it")


def _marked(run: PlannedRun, study: Study) -> PlannedRun:
    log = run.config.log.model_copy(update={"plan": study.mark})
    return replace(run, config=run.config.model_copy(update={"log": log}))
