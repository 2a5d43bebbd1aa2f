"""What a matrix runs: the runs of a plan, and the checks of any runs before they start."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from .terminal import count_of, echo, folded

if TYPE_CHECKING:
    from ..lab.plan import PlannedRun, Request
    from ..runs.confirmation import Study


def study_runs(file: Path, request: Request, dry_run: bool) -> list[PlannedRun]:
    """Return the runs of a plan, checked, and say which of them are there without it."""
    from ..lab.confirm import load_study, made_otherwise, plan_study

    study = load_study(file)
    planned = plan_study(study, request)
    otherwise = made_otherwise(study, planned)
    if otherwise:
        what = f"{count_of(len(otherwise))} in {request.output}, such as {otherwise[0].name},"
        echo(
            f"oelm: {what} began before this plan or under another version of it and will not count for it; to run the "
            "plan as it is, give it an --out of its own",
            fg="yellow",
            err=True,
        )
    if dry_run:
        _print_hypotheses(study)
    return checked(planned, dry_run)


def checked(planned: list[PlannedRun], dry_run: bool) -> list[PlannedRun]:
    """Return the runs; raise if anything they need is missing. A dry run prints them and exits."""
    from ..lab.preflight import require_available

    if dry_run:
        _print_dry_runs(planned)
        raise typer.Exit()
    require_available(planned)
    return planned


def _print_hypotheses(study: Study) -> None:
    for hypothesis in study.confirmation.hypotheses:
        one, other = (set(study.seeds(arm)) for arm in (hypothesis.arm, hypothesis.against))
        counts = f"{len(one & other)} pairs" if hypothesis.test == "paired" else f"{len(one)} and {len(other)} seeds"
        text = (
            f"{hypothesis.id}: {hypothesis.arm} against {hypothesis.against}, {counts} ({hypothesis.test}); margin "
            f"{100 * hypothesis.margin:+g} % of the perplexity on {study.confirmation.judges}"
        )
        echo("\n  ".join(folded(text, 2)))


def _print_dry_runs(planned: list[PlannedRun]) -> None:
    from ..lab.dry_run import dry_run

    for run in planned:
        counts = dry_run(run)
        stand_in = f" (counted on a default {counts.stand_in})" if counts.stand_in else ""
        adapters = f", {counts.adapters} adapters" if counts.adapters else ""
        changes = f"; changes at steps {', '.join(map(str, counts.changes_at))}" if counts.changes_at else ""
        text = (
            f"{run.name}: {counts.parameters:,} parameters{stand_in}, {counts.trainable:,} of them trained, "
            f"{counts.matrices} matrices set or frozen{adapters}{changes}"
        )
        echo("\n  ".join(folded(text, 2)))
    echo(f"{count_of(len(planned))}, all valid; their data was not read")
