"""The lab's commands, from experiments to demo. Thin, and gathered by `oelm.cli`."""

from __future__ import annotations

import json
from contextlib import suppress
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .terminal import errors

if TYPE_CHECKING:
    from ..lab.launch.local import Launcher
    from ..lab.plan import Planned, Request

# Above either of these a matrix asks before it starts.
MANY_RUNS, MANY_HOURS = 50, 24.0


class Scale(StrEnum):
    """How large an experiment is run."""

    full = "full"
    smoke = "smoke"


class Where(StrEnum):
    """What starts the runs."""

    local = "local"
    slurm = "slurm"


OutOption = Annotated[Path, typer.Option("--out", "-o", help="The folder that holds the runs.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")]
ScaleOption = Annotated[Scale, typer.Option(help="full, or smoke: a tiny model on built-in data, in seconds.")]
DataOption = Annotated[str | None, typer.Option(help="Your own copy of the data: a folder. Not at smoke scale.")]
GpusOption = Annotated[str | None, typer.Option(help="GPUs to use, such as 0,1; '' for none. Default: all free ones.")]
JobsOption = Annotated[int | None, typer.Option(min=1, help="Runs at once: on the CPU, or on each GPU or set of GPUs.")]
ProcessesOption = Annotated[int, typer.Option("--gpus-per-run", min=1, help="Processes (and so GPUs) per run.")]
YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
_RUNS = Path("runs")
RunName = Annotated[str, typer.Argument(help="A run's folder, or a part of its name.")]


def register(app: typer.Typer) -> None:
    """Add the lab's commands to a command line."""
    for command in (experiments, run, matrix, status, logs, stop, clean, archive, demo):
        app.command()(command)


def experiments(
    name: Annotated[str | None, typer.Argument(help="Show this experiment in full.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the named experiments: the question of each, and what was published for it."""
    with errors():
        from ..lab.experiment import find, listed
        from .run_tables import details, experiment_lines

        if name is not None:
            import yaml

            shown = details(find(name))
            typer.echo(
                json.dumps(shown, indent=2) if as_json else yaml.safe_dump(shown, sort_keys=False, allow_unicode=True)
            )
        elif as_json:
            typer.echo(json.dumps([details(experiment) for experiment in listed()], indent=2))
        else:
            typer.echo("\n".join(experiment_lines(listed())))


def run(
    name: Annotated[str, typer.Argument(help="An experiment's name, or a YAML file of your own.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value for other settings.")] = None,
    scale: ScaleOption = Scale.full,
    data: DataOption = None,
    seed: Annotated[int, typer.Option(help="The run's seed.")] = 0,
    out: OutOption = _RUNS,
    gpus: GpusOption = None,
    jobs: JobsOption = None,
    gpus_per_run: ProcessesOption = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check it without data, and train nothing.")] = False,
    yes: YesOption = False,
) -> None:
    """Run one experiment with one seed (all its arms). The same command resumes runs that were interrupted."""
    with errors():
        from ..lab.plan import Request

        request = Request(scale.value, (seed,), {}, tuple(overrides or ()), data, str(out))
        planned = _plan([name], request)
        if dry_run:
            _dry_run(planned)
            return
        _require(planned)
        if len(planned) == 1 and gpus_per_run == 1 and gpus is None:
            code = _train_here(planned[0])
        else:
            from ..lab.launch.local import local_launcher

            code = _run_matrix(planned, local_launcher(gpus, jobs, gpus_per_run), 1, yes)
    raise typer.Exit(code)


def matrix(
    names: Annotated[list[str], typer.Argument(help="Experiments, YAML files of your own, and key=value overrides.")],
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds: 0 to N - 1.")] = None,
    lr_grid: Annotated[str | None, typer.Option(help="Learning rates for every arm, such as 3e-4,1e-3.")] = None,
    axis: Annotated[list[str] | None, typer.Option(help="One more axis, such as data.fraction=0.1,1.")] = None,
    scale: ScaleOption = Scale.full,
    data: DataOption = None,
    out: OutOption = _RUNS,
    retries: Annotated[int, typer.Option(min=0, help="How often a failed run is retried.")] = 1,
    launcher: Annotated[Where, typer.Option(help="local, or slurm (needs submitit).")] = Where.local,
    gpus: GpusOption = None,
    jobs: JobsOption = None,
    gpus_per_run: ProcessesOption = 1,
    partition: Annotated[str | None, typer.Option(help="Slurm: the partition.")] = None,
    minutes: Annotated[int, typer.Option("--time", min=1, help="Slurm: minutes until a job is requeued.")] = 480,
    cpus: Annotated[int, typer.Option(min=1, help="Slurm: cores per process.")] = 4,
    slurm: Annotated[list[str] | None, typer.Option(help="Slurm: more sbatch options, as key=value.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every run without data; train nothing.")] = False,
    yes: YesOption = False,
) -> None:
    """Run a matrix: experiments x methods x learning rates x seeds. Skips finished runs, resumes interrupted ones.

    Exits with 1 if a run failed or diverged, and with 75 if some were stopped: the same command resumes those.
    """
    with errors():
        from ..lab.plan import LEARNING_RATE, Request, parse_values

        axes = _axes(axis or [])
        extra = dict(_pair("--slurm", text, "key=value, such as account=lab") for text in slurm or [])
        if lr_grid is not None:
            if LEARNING_RATE in axes:
                from ..errors import LabError

                raise LabError(f"--lr-grid and --axis {LEARNING_RATE}=... both list learning rates: give one of them")
            axes[LEARNING_RATE] = parse_values(lr_grid)
        counted = None if seeds is None else tuple(range(seeds))
        overrides = tuple(word for word in names if "=" in word and not _is_file(word))
        request = Request(scale.value, counted, axes, overrides, data, str(out))
        planned = _plan([word for word in names if word not in overrides], request)
        if dry_run:
            _dry_run(planned)
            return
        _require(planned)
        chosen: Launcher
        if launcher is Where.slurm:
            from ..lab.launch.slurm import slurm_launcher

            chosen = slurm_launcher(
                out, partition=partition, gpus=gpus_per_run, minutes=minutes, cpus=cpus, jobs=jobs or 64, extra=extra
            )
        else:
            from ..lab.launch.local import local_launcher

            chosen = local_launcher(gpus, jobs, gpus_per_run)
        code = _run_matrix(planned, chosen, retries, yes)
    raise typer.Exit(code)


def status(
    out: Annotated[Path, typer.Argument(help="The folder that holds the runs.")] = _RUNS,
    once: Annotated[bool, typer.Option("--once", help="Show it once, even in a terminal.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Show every run: its state, step, loss, speed, time left, host and memory. Updates live in a terminal."""
    with errors():
        from ..lab.status import survey
        from .run_tables import status_lines, watch

        _require_folder(out)
        runs = survey(out)
        if as_json:
            typer.echo(json.dumps([state.to_dict() for state in runs], indent=2))
        elif _terminal() and not once:
            watch(lambda: survey(out))
        else:
            typer.echo("\n".join(status_lines(runs)))


def logs(
    name: RunName,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Keep printing until the run ends.")] = False,
    lines: Annotated[int, typer.Option("--lines", "-n", min=0, help="How many lines to print.")] = 40,
    out: OutOption = _RUNS,
) -> None:
    """Print the end of a run's log."""
    with errors():
        from ..lab import control
        from ..lab.status import find_run

        with suppress(KeyboardInterrupt):
            for line in control.log_lines(find_run(name, out), lines, follow):
                typer.echo(line.rstrip("\n"))


def stop(
    name: Annotated[
        str | None, typer.Argument(help="A run's folder, or a part of its name; with --all, the folder of the runs.")
    ] = None,
    everything: Annotated[bool, typer.Option("--all", help="Every run and matrix in progress in the folder.")] = False,
    out: OutOption = _RUNS,
) -> None:
    """Ask a run to save a checkpoint and stop. The command that started it can resume it later."""
    with errors():
        from ..errors import LabError
        from ..lab import control
        from ..lab.status import find_run, survey

        if not everything:
            if name is None:
                raise LabError("name one run, or give --all")
            state = find_run(name, out)
            typer.echo(f"{state.name}: {control.stop(state)}")
            return
        if name is not None and out != _RUNS:
            raise LabError(f"--all {name}: stops everything in a folder: name only the folder, or give it with --out")
        out = out if name is None else Path(name)
        _require_folder(out)
        matrices = control.stop_matrices(out)  # before its runs: a matrix would start the next one at once
        wanted = [state for state in survey(out) if state.live]
        if not wanted and not matrices:
            raise LabError(f"no run is in progress below {out}")
        for line in matrices.values():
            typer.echo(line)
        for state in wanted:
            with_matrix = control.matrix_of(state) in matrices
            typer.echo(f"{state.name}: {'stops with its matrix' if with_matrix else control.stop(state)}")


def clean(
    out: Annotated[Path, typer.Argument(help="The folder that holds the runs.")] = _RUNS,
    best: Annotated[bool, typer.Option("--best", help="Remove the best models too.")] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Remove the checkpoints of finished runs. Shows what this frees, and asks first. Records are never removed."""
    with errors():
        from ..lab.control import free, freeable
        from ..lab.status import so_many, survey

        _require_folder(out)
        things = freeable(survey(out), best)
        total = sum(thing.bytes for thing in things)
        if as_json:
            typer.echo(json.dumps([{"path": str(thing.path), "bytes": thing.bytes} for thing in things], indent=2))
        else:
            for thing in things:
                typer.echo(f"{thing.bytes / 1e6:>10,.1f} MB  {thing.path}")
            typer.echo(f"{total / 1e6:>10,.1f} MB  in {so_many(len(things), 'folder')} of finished runs")
        if not things or (as_json and not yes):
            return
        _ask("Remove them?", yes)
        typer.echo(f"freed {free(things) / 1e6:,.1f} MB", err=as_json)


def archive(
    runs: Annotated[list[Path], typer.Argument(help="Folders of runs, or above them.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to keep the records in.")],
    points: Annotated[int, typer.Option(min=2, help="Lines of training loss to keep for each run.")] = 50,
    as_json: JsonOption = False,
) -> None:
    """Copy the records of runs that have ended, without models and logs: small enough to commit."""
    with errors():
        from ..lab.archive import archive as keep
        from ..lab.status import so_many

        for folder in runs:
            _require_folder(folder)
        kept = keep(runs, out, points)
        if as_json:
            typer.echo(json.dumps([one.to_dict() for one in kept], indent=2))
            return
        for one in kept:
            if one.outcome == "left out":
                typer.echo(f"left out: {one.run.path}, which is {one.run.state}")
        new, there = (sum(one.outcome == outcome for one in kept) for outcome in ("archived", "there"))
        typer.echo(f"archived {so_many(new)} in {out}" + (f"; {so_many(there)} there already" if there else ""))


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the runs and the report go.")] = Path("demo"),
    minutes: Annotated[float, typer.Option(min=0.5, help="Time limit, including the report.")] = 4.0,
) -> None:
    """Train a tiny GPT with seven methods on built-in stories and report what that shows: four minutes, two cores."""
    with errors():
        from .demo import run_demo

        code = run_demo(out, minutes * 60)
    raise typer.Exit(code)


def _plan(names: list[str], request: Request) -> list[Planned]:
    from ..errors import LabError
    from ..lab.experiment import find
    from ..lab.plan import expand

    if not names:
        raise LabError("name at least one experiment: `oelm experiments` lists them")
    return expand([find(name) for name in names], request)


def _dry_run(planned: list[Planned]) -> None:
    from ..lab.dry_run import dry_run
    from ..lab.status import so_many

    for run in planned:
        tried = dry_run(run)
        changes = f"; changes at steps {', '.join(map(str, tried.changes_at))}" if tried.changes_at else ""
        counted = f" of a {tried.stand_in} that stands in" if tried.stand_in else ""
        adapters = f", {tried.adapters} adapters" if tried.adapters else ""
        what = f"{tried.parameters:,} parameters{counted}, {tried.trainable:,} of them trained, "
        what += f"{tried.matrices} matrices set or frozen{adapters}{changes}"
        typer.echo(f"{run.name}: {what}")
    typer.echo(f"{so_many(len(planned))}, all in order; their data was not looked at")


def _require(planned: list[Planned]) -> None:
    from ..lab.preflight import require_all

    require_all(planned)


def _train_here(planned: Planned) -> int:
    """One run in this process, with its own progress."""
    from ..training.engine import Stopped, train
    from ..training.result import exit_code
    from .terminal import quiet_libraries

    quiet_libraries()
    try:
        return exit_code(train(planned.config))
    except Stopped as stopped:
        return stopped.code


def _run_matrix(planned: list[Planned], launcher: Launcher, retries: int, yes: bool) -> int:
    from ..lab.estimate import estimate
    from ..lab.matrix import Matrix
    from ..training.signals import EXIT_REQUEUE
    from .run_tables import MatrixView

    size = estimate(planned, launcher.slots)
    typer.echo(f"{size}, {launcher.slots} at once", err=True)
    if size.runs - size.done > MANY_RUNS or size.hours > MANY_HOURS:
        _ask("Start them?", yes)
    with MatrixView() as view:
        work = Matrix(planned, launcher, retries, view.say)
        counts = work.run(view)
    typer.echo(", ".join(f"{count} {state}" for state, count in counts.items()))
    if any(counts.get(state) for state in ("failed", "diverged", "blocked")):
        return 1
    return 0 if set(counts) <= {"finished"} else EXIT_REQUEUE


def _is_file(word: str) -> bool:
    """Whether a word is an experiment's file: its path may have an equals sign, as an override has."""
    return word.endswith((".yaml", ".yml", ".json")) and Path(word).is_file()


def _axes(written: list[str]) -> dict[str, tuple[Any, ...]]:
    from ..errors import LabError
    from ..lab.plan import parse_values

    axes: dict[str, tuple[Any, ...]] = {}
    for text in written:
        name, values = _pair("--axis", text, "field=value,value, such as data.fraction=0.1,1")
        if name in axes:
            raise LabError(f"--axis {name}: given twice")
        axes[name] = parse_values(values)
    return axes


def _pair(option: str, text: str, form: str) -> tuple[str, str]:
    """The two sides of an option that is written as key=value."""
    from ..errors import LabError

    name, _, value = text.partition("=")
    if not name or not value:
        raise LabError(f"{option} {text}: write it as {form}")
    return name, value


def _ask(question: str, yes: bool) -> None:
    """Go on if the user says so; without a terminal, only with --yes."""
    if yes:
        return
    from ..errors import LabError
    from .run_tables import interactive

    if not interactive():
        raise LabError(f"{question} There is no terminal to ask in: give --yes to continue")
    if not typer.confirm(question):
        raise typer.Exit(1)


def _require_folder(out: Path) -> None:
    from ..errors import LabError

    if not out.is_dir():
        raise LabError(f"{out}: no such folder; name the one that holds the runs")


def _terminal() -> bool:
    import sys

    return sys.stdout.isatty()
