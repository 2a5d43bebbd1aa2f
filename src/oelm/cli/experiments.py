"""Commands that run experiments: experiments, run, matrix, demo."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from ..errors import AnalysisError
from . import completion
from .given import given_words
from .options import (
    HOST_PARAMETERS,
    RUNS,
    HostCommandOption,
    HostFolderOption,
    HostOption,
    JsonOption,
    OutOption,
    YesOption,
)
from .terminal import confirm, count_of, duration, echo, errors, folded, listing, repeat_command
from .train import train_and_print

if TYPE_CHECKING:
    from ..lab.estimate import DurationEstimate
    from ..lab.experiment import Experiment
    from ..lab.launch.host import Host
    from ..lab.launch.interface import Launcher
    from ..lab.plan import PlannedRun, Request

# A matrix with more runs or hours than this asks before it starts.
_MANY_RUNS, _MANY_HOURS = 50, 24.0


ScaleOption = Annotated[
    Literal["full", "smoke"], typer.Option(help="full, or smoke: a tiny model on built-in data, in seconds.")
]
DataOption = Annotated[str | None, typer.Option(help="Your own copy of the data: a folder. Not at smoke scale.")]
GpusOption = Annotated[str | None, typer.Option(help="GPUs to use, such as 0-3; '' for none. Default: all free ones.")]
JobsOption = Annotated[int | None, typer.Option(min=1, help="Runs at once: on the CPU, or on each GPU or set of GPUs.")]
ProcessesOption = Annotated[int, typer.Option("--gpus-per-run", min=1, help="Processes (and so GPUs) per run.")]


def experiments(
    name: Annotated[
        str | None, typer.Argument(help="Show this experiment in full.", autocompletion=completion.experiments)
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """List the named experiments: the question of each, and what was published for it."""
    with errors():
        from ..lab.experiment import find_experiment, runnable_experiments

        if name is not None:
            import yaml

            from ..base.text import WIDTH

            details = _details(find_experiment(name))
            # A line is broken at the first space behind the width.
            style: dict[str, Any] = {"default_flow_style": None, "width": WIDTH - 22}
            text = yaml.safe_dump(details, sort_keys=False, allow_unicode=True, **style)
            echo(json.dumps(details, indent=2) if as_json else text)
        elif as_json:
            echo(json.dumps([_details(experiment) for experiment in runnable_experiments()], indent=2))
        else:
            echo("\n".join(_experiment_lines(runnable_experiments())))


def run(
    name: Annotated[
        str,
        typer.Argument(help="An experiment's name, or a YAML file of your own.", autocompletion=completion.experiments),
    ],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="key=value for other settings.", autocompletion=completion.settings)
    ] = None,
    scale: ScaleOption = "full",
    data: DataOption = None,
    seed: Annotated[int, typer.Option(help="The run's seed.")] = 0,
    out: OutOption = RUNS,
    gpus: GpusOption = None,
    jobs: JobsOption = None,
    gpus_per_run: ProcessesOption = 1,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check it without data, and train nothing.")] = False,
    yes: YesOption = False,
) -> None:
    """Run one experiment with one seed (all its arms). The same command resumes runs that were interrupted."""
    with errors():
        from ..lab.plan import Request

        planned = _plan([name], Request(scale, (seed,), {}, tuple(overrides or ()), data, str(out)), dry_run)
        if len(planned) == 1 and gpus_per_run == 1 and gpus is None:
            train_and_print(planned[0].config, quiet=False)
        from ..lab.launch.local import local_launcher

        code = _run_matrix(planned, local_launcher(gpus, jobs, gpus_per_run), 1, yes)
    raise typer.Exit(code)


def matrix(
    context: typer.Context,
    names: Annotated[
        list[str],
        typer.Argument(
            help="Experiments, YAML files of your own, and key=value overrides; or the plan of a study.",
            autocompletion=completion.experiments_and_settings,
        ),
    ],
    seeds: Annotated[int | None, typer.Option(min=1, help="How many seeds: 0 to N - 1.")] = None,
    lr_grid: Annotated[str | None, typer.Option(help="Learning rates for every arm, such as 3e-4,1e-3.")] = None,
    axis: Annotated[list[str] | None, typer.Option(help="One more axis, such as data.fraction=0.1,1.")] = None,
    scale: ScaleOption = "full",
    data: DataOption = None,
    out: OutOption = RUNS,
    retries: Annotated[int, typer.Option(min=0, help="How often a failed run is retried.")] = 1,
    launcher: Annotated[Literal["local", "slurm"], typer.Option(help="local, or slurm (needs submitit).")] = "local",
    gpus: GpusOption = None,
    jobs: JobsOption = None,
    gpus_per_run: Annotated[
        int, typer.Option(min=0, help="Processes (and so GPUs) per run. Slurm: 0 for one process on the CPU.")
    ] = 1,
    partition: Annotated[str | None, typer.Option(help="Slurm: the partition.")] = None,
    minutes: Annotated[int, typer.Option("--time", min=1, help="Slurm: minutes until a job is requeued.")] = 480,
    cpus: Annotated[int, typer.Option(min=1, help="Slurm: cores per process.")] = 4,
    slurm: Annotated[list[str] | None, typer.Option(help="Slurm: more sbatch options, as key=value.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Check every run without data; train nothing.")] = False,
    detach: Annotated[bool, typer.Option("--detach", help="Return at once; it goes on after you log out.")] = False,
    host: HostOption = None,
    host_command: HostCommandOption = "oelm",
    host_folder: HostFolderOption = "",
    yes: YesOption = False,
    as_json: Annotated[bool, typer.Option("--json", help="With --detach: print what was started as JSON.")] = False,
) -> None:
    """Run a matrix: experiments x methods x learning rates x seeds. Skips finished runs, resumes interrupted ones.

    The YAML file of a plan runs what its confirmation part says, and each run records the plan (docs/lab.md).

    Exits with 1 if a run failed or diverged, and with 75 if some were stopped: the same command resumes those.
    """
    with errors():
        from ..errors import LabError
        from ..lab.confirm import named_plan
        from ..lab.launch.host import Host
        from ..lab.plan import Request
        from .plan import study_runs

        if as_json and not detach:
            raise LabError("--json prints what --detach started: give both, or neither")
        if host is not None:
            code = _matrix_on_host(context, names, Host(host, host_command, host_folder))
            raise typer.Exit(code)
        axes = _axes(axis or [], lr_grid)
        sbatch = dict(_split_pair("--slurm", text, "key=value, such as account=lab") for text in slurm or [])
        # The path of an experiment's file may contain an equals sign, as an override does.
        files = [word for word in names if word.endswith((".yaml", ".yml", ".json")) and Path(word).is_file()]
        overrides = tuple(word for word in names if "=" in word and word not in files)
        seed_list = None if seeds is None else tuple(range(seeds))
        request = Request(scale, seed_list, axes, overrides, data, str(out))
        experiment_names = [word for word in names if word not in overrides]
        plan_file = named_plan(experiment_names)
        if plan_file is not None:
            planned = study_runs(plan_file, request, dry_run)
        else:
            planned = _plan(experiment_names, request, dry_run)
        if detach:
            _detach(planned, given_words(context, without=("detach", "as_json", *HOST_PARAMETERS)), as_json)
            return
        run_launcher: Launcher
        if launcher == "slurm":
            from ..lab.launch.slurm import SlurmOptions, slurm_launcher

            options = SlurmOptions(partition=partition, gpus=gpus_per_run, minutes=minutes, cpus=cpus, extra=sbatch)
            run_launcher = slurm_launcher(out, options, jobs or 64)
        else:
            from ..lab.launch.local import local_launcher

            run_launcher = local_launcher(gpus, jobs, gpus_per_run)
        code = _run_matrix(planned, run_launcher, retries, yes, plan_file)
    raise typer.Exit(code)


def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="Where the runs and the report go.")] = Path("demo"),
    minutes: Annotated[float, typer.Option(min=0.5, help="Time limit, including the report.")] = 4.0,
) -> None:
    """Train a tiny GPT with seven methods on built-in stories and report what that shows: four minutes, two cores.

    With less time, or on a slower machine, the runs are shorter; only then are there fewer methods.
    """
    with errors():
        from .demo import run_demo

        code = run_demo(out, minutes * 60)
    raise typer.Exit(code)


def _plan(names: list[str], request: Request, dry_run: bool) -> list[PlannedRun]:
    """Return the runs of the experiments; raise if anything they need is missing. A dry run prints them and exits."""
    from ..errors import LabError
    from ..lab.experiment import find_experiment
    from ..lab.plan import plan_runs
    from .plan import checked

    if not names:
        raise LabError("name at least one experiment: `oelm experiments` lists them")
    return checked(plan_runs([find_experiment(name) for name in names], request), dry_run)


def _axes(options: list[str], lr_grid: str | None) -> dict[str, tuple[Any, ...]]:
    """Return the axes of --axis and --lr-grid, each with its values."""
    from ..errors import LabError
    from ..lab.plan import LEARNING_RATE, parse_values

    axes: dict[str, tuple[Any, ...]] = {}
    for text in options:
        name, values = _split_pair("--axis", text, "field=value,value, such as data.fraction=0.1,1")
        if name in axes:
            raise LabError(f"--axis {name}: given twice")
        axes[name] = parse_values(values)
    if lr_grid is not None:
        if LEARNING_RATE in axes:
            raise LabError(f"--lr-grid and --axis {LEARNING_RATE}=... both list learning rates: give one of them")
        axes[LEARNING_RATE] = parse_values(lr_grid)
    return axes


def _split_pair(option: str, text: str, form: str) -> tuple[str, str]:
    """Return the two sides of an option's key=value; `form` shows how it should be written."""
    from ..errors import LabError

    name, _, value = text.partition("=")
    if not name or not value:
        raise LabError(f"{option} {text}: write it as {form}")
    return name, value


def _detach(planned: list[PlannedRun], words: list[str], as_json: bool) -> None:
    """Run the matrix of these words in the background, and say how to see it."""
    from ..lab.launch.detached import detach

    out = Path(planned[0].config.output)
    started = detach(words, out, [run.name for run in planned])
    if as_json:
        echo(json.dumps({**started.to_dict(), "runs": [run.name for run in planned]}, indent=2))
        return
    how = "is in progress already" if started.before else "has started"
    echo(f"a matrix of {count_of(len(planned))} {how} as process {started.process}; its log: {started.log}")
    place = "" if out == RUNS else f" --out {shlex.quote(str(out))}"
    folder = "" if out == RUNS else f" {shlex.quote(str(out))}"
    echo(f"to see it: oelm logs --follow{place}, or oelm status{folder}; to stop it: oelm stop --all{folder}")


def _matrix_on_host(context: typer.Context, names: list[str], host: Host) -> int:
    """Run a matrix on another machine, where it goes on whatever happens here; return the exit code."""
    from ..lab.confirm import holds_plan
    from . import host as there

    out, as_json = Path(context.params["out"]), context.params["as_json"]
    sent = there.send_files(host, names, out)
    words = given_words(context, ("detach", "as_json", *HOST_PARAMETERS), sent)
    if context.params["dry_run"]:
        there.forward(host, there.with_plugin(host, words, out))
        return 0
    words[1:1] = ["--detach", "--json"]
    started = there.start_matrix(host, there.with_plugin(host, words, out))
    if context.params["detach"]:
        where = shlex.join([*host.options, *([] if out == RUNS else [f"--out={out}"])])
        seen = f"to see it: oelm logs --follow {where}; to get its records: the same command without --detach"
        echo(json.dumps(started, indent=2) if as_json else seen)
        return 0
    counts = there.follow_matrix(host, out, started)
    plan = next((Path(name) for name in names if holds_plan(Path(name))), None)
    return _conclude([out / name for name in started["runs"]], counts, plan)


def _run_matrix(
    planned: list[PlannedRun], launcher: Launcher, retries: int, yes: bool, plan: Path | None = None
) -> int:
    """Run a matrix after showing its size, and show how its methods compare; return the exit code."""
    return _conclude([run.folder for run in planned], run_planned(planned, launcher, retries, yes), plan)


def run_planned(planned: list[PlannedRun], launcher: Launcher, retries: int, yes: bool) -> dict[str, int]:
    """Run a matrix after showing its size; return how many runs ended in each state."""
    from ..lab.estimate import estimate
    from ..lab.matrix import Matrix
    from .run_tables import MatrixView

    size = estimate(planned, launcher.slots)
    echo(f"{_estimate_text(size)}, {launcher.slots} at once", err=True)
    if size.runs - size.done > _MANY_RUNS or size.hours > _MANY_HOURS:
        confirm("Start them?", yes)
    with MatrixView() as view:
        return Matrix(planned, launcher, retries, view.print_event).run(view.show)


def _conclude(folders: list[Path], counts: Mapping[str, int], plan: Path | None = None) -> int:
    """Print how the runs of a matrix ended; return the exit code."""
    echo(", ".join(f"{count} {state}" for state, count in counts.items()))
    _print_outcome(folders, counts, plan)
    return exit_code(counts)


def exit_code(counts: Mapping[str, int]) -> int:
    """Return the exit code of a matrix whose runs ended in these states."""
    from ..training.signals import EXIT_REQUEUE

    if any(counts.get(state) for state in ("failed", "diverged", "blocked")):
        return 1
    return 0 if set(counts) <= {"finished"} else EXIT_REQUEUE


def _print_outcome(folders: list[Path], counts: Mapping[str, int], plan: Path | None) -> None:
    """Print how the methods compare in the runs that are done, and the command to type next."""
    from .outcome import analyse_finished, outcome_lines

    root = folders[0].parents[2]  # <out>/<experiment>/<method>/seed-<n>
    try:
        analysis = analyse_finished(folders)
    except AnalysisError as error:  # every run diverged, or the records cannot be read: the report says so too
        echo(str(error), err=True)
        analysis = None
    if analysis is not None:
        echo("\n".join(["", *outcome_lines(analysis)]))
    for folder in folders:
        if counts.get("failed") and not (folder / "result.json").is_file():
            echo(f"what went wrong: oelm logs {folder}")
            break
    if set(counts) & {"stopped", "left", "elsewhere"}:
        echo(f"to go on from there: {repeat_command()}")
    elif analysis is not None:
        of_plan = "" if plan is None else f" --plan {shlex.quote(str(plan))}"
        echo(f"next: oelm report {root}{of_plan} --out report")


def _estimate_text(size: DurationEstimate) -> str:
    remaining = size.runs - size.done
    if not remaining:
        return f"{count_of(size.runs)}, all done"
    basis = "from runs that are done" if size.measured >= remaining else "a rough estimate from their FLOPs"
    done = f", {size.done} of them done" if size.done else ""
    return f"{count_of(size.runs)}{done}; about {duration(size.hours * 3600)} ({basis})"


def _experiment_lines(experiments: Sequence[Experiment]) -> list[str]:
    """Return the list of experiments by group, each with its question and what was published for it."""
    width = max(len(experiment.id) for experiment in experiments)
    lines: list[str] = []
    for group, members in groupby(experiments, key=lambda experiment: experiment.group):
        entries = []
        for experiment in members:
            figures = _published_figures(experiment)
            published = f"  [published: {figures}]" if figures else ""
            entries.append((f"{experiment.id:<{width}}", f"{experiment.asks}{published}"))
        lines += [*([""] if lines else []), *folded(group), *listing(entries, indent=2)]
    return lines


def _details(experiment: Experiment) -> dict[str, Any]:
    """Return all fields of an experiment, and the published figures, for `oelm experiments NAME` and --json."""
    about = experiment.model_dump(mode="json", exclude={"abstract"})
    return {**about, "published": list(experiment.published), "figures": _published_figures(experiment)}


def _published_figures(experiment: Experiment) -> str:
    """Return the published figures of an experiment in a few words, or an empty string."""
    from ..runs.published import load

    parts = []
    known = load().experiments
    for entry in (known[id] for id in experiment.published):
        prefix = f"{entry.method} " if len(experiment.published) > 1 else ""
        for metric, form in (("perplexity", ".2f"), ("accuracy", ".2%")):
            if metric in entry.figures:
                parts.append(f"{prefix}{metric} {entry.figures[metric]:{form}}")
    return ", ".join(parts)
