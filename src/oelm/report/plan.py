"""The first section of a report on a planned study: its hypotheses and verdicts, and which runs they rest on."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, replace
from typing import Any

from ..analysis import Analysis
from ..analysis.confirm import DOES_NOT_HOLD, HOLDS, Confirmed, Tested
from ..analysis.planned import BEFORE, SETTINGS, VERSION, PlannedRuns
from ..analysis.run import Run
from ..analysis.shown import Shown
from . import numbers
from .charts import Styles
from .document import Block, Bullets, Cell, Heading, Paragraph, Table
from .sections import handles
from .sentences import count_text, field_text, note_text
from .shown import figures_of, tables_of
from .words import Words

_TONES = {HOLDS: "good", DOES_NOT_HOLD: "bad"}
# The sections that a plan makes descriptive, by how their anchors begin. The others list runs and explain terms.
_DESCRIPTIVE = ("summary", "results-", "hypotheses", "published", "step-time")


def plan_section(analysis: Analysis, styles: Styles, say: Words) -> list[Block]:
    """Return the section of a plan; nothing for a report without one."""
    confirmed = analysis.confirmed
    if confirmed is None:
        return []
    blocks: list[Block] = [Heading(say("plan"), 2, "plan"), Paragraph(_about(confirmed, say), tone="muted")]
    blocks += [_verdicts(confirmed, say), _tests(confirmed, analysis, say)]
    items = [
        Cell(say("headed", head=tested.hypothesis.id, text=text))
        for tested in confirmed.tested
        for text in hypothesis_notes(tested, say)
    ]
    blocks += [Bullets(items)] if items else []
    numbered = set(analysis.runs)  # a run that equals one counted before it has no number of its own

    def handles_of(runs: tuple[Run, ...]) -> tuple[str, ...]:
        return handles(analysis, tuple(run for run in runs if run in numbered))

    blocks += figures_of(confirmed.shown, "plan", styles, say, confirmed.tested)
    blocks += tables_of(confirmed.shown, "plan", say, handles_of)
    if confirmed.planned.missing:
        blocks += [Paragraph(_missing(confirmed.planned, say)), Bullets([Cell(confirmed.planned.command, code=True)])]
    blocks += [Paragraph(text) for text in _runs_texts(confirmed.planned, say)]
    others = count_text("run", confirmed.planned.others, say)
    return [*blocks, Paragraph(say("plan_descriptive", runs=others))]


def marked_descriptive(blocks: list[Block], say: Words) -> list[Block]:
    """Return the other sections of the report with what they are in their headings."""
    return [
        replace(block, text=say("in_brackets", text=block.text, more=say("descriptive")))
        if isinstance(block, Heading) and block.level == 2 and block.anchor.startswith(_DESCRIPTIVE)
        else block
        for block in blocks
    ]


def plan_lines(confirmed: Confirmed, say: Words) -> list[str]:
    """Return a line for each hypothesis, for a terminal, and what is said of the runs that have ended."""
    lines = []
    for tested in confirmed.tested:
        found = say("in_brackets", text=_change(tested), more=_interval(tested, say)) if tested.change else "–"
        shown = {"verdict": say(tested.verdict), "claim": tested.hypothesis.claim, "found": found}
        lines.append(say("plan_line", id=tested.hypothesis.id, counts=_counts(tested, say), **shown))
    return [*lines, *_runs_texts(confirmed.planned, say)]


def missing_lines(confirmed: Confirmed, say: Words) -> list[str]:
    """Return how many planned runs are missing and the command that runs them, for a terminal; nothing without any."""
    return [_missing(confirmed.planned, say), confirmed.planned.command] if confirmed.planned.missing else []


def hypothesis_notes(tested: Tested, say: Words) -> list[str]:
    """Return what a reader must know about the runs of a hypothesis."""
    texts = []
    for note in tested.notes:
        values = dict(note.values)
        if "fields" in values:
            named = [field_text(field, say) for field in values["fields"].split(", ")]
            texts.append(say(f"note_{note.code}", fields=say("list").join(named)))
        else:
            texts.append(note_text(note, say))
    return texts


def _about(confirmed: Confirmed, say: Words) -> str:
    """Return what the plan says of its data and splits, and how many of its runs there are."""
    planned = confirmed.planned
    study, confirmation = planned.study, planned.study.confirmation
    tokens = confirmation.tokens if isinstance(confirmation.tokens, str) else f"{confirmation.tokens:,.0f}"
    told = say(
        "plan_about",
        name=study.path.name,
        sha=study.sha256[:12],
        data=confirmation.data,
        tokens=tokens,
        chooses=say(f"split_{confirmation.chooses}"),
        judges=say(f"split_{confirmation.judges}"),
    )
    counts = say(
        "plan_counts",
        planned=count_text("run", len(study.configs), say),
        finished=len(planned.finished),
        lost=len(planned.lost),
        missing=len(planned.missing),
    )
    same = [say("plan_same_split")] if confirmation.chooses == confirmation.judges else []
    return say.in_a_row([told, counts, *same])


def _verdicts(confirmed: Confirmed, say: Words) -> Table:
    """Return what was claimed, what was found, and the verdicts."""
    level = f"{100 * (1 - confirmed.planned.study.confirmation.alpha):g}"
    columns = ["id", *say.all("col_claim", "col_verdict", "col_margin", "col_change"), say("col_level", level=level)]
    table = Table("plan", [*columns, say("col_texts")], numeric=(3, 4, 5, 6))
    for tested in confirmed.tested:
        hypothesis, texts = tested.hypothesis, tested.over_texts
        table.add(
            hypothesis.id,
            hypothesis.claim,
            Cell(say(tested.verdict), tone=_TONES.get(tested.verdict, "open")),
            numbers.short_percent(hypothesis.margin),
            _change(tested),
            _interval(tested, say),
            f"{numbers.percent(texts[0], 2)} – {numbers.percent(texts[1], 2)}" if texts else "–",
        )
    return table


def _tests(confirmed: Confirmed, analysis: Analysis, say: Words) -> Table:
    """Return the tests that the verdicts come from, and the runs."""
    alpha = confirmed.planned.study.confirmation.alpha
    values = {"level": f"{100 * (1 - alpha):g}", "side": f"{alpha / 2:g}", "family": len(confirmed.tested)}
    columns = ["id", *say.all("col_method", "col_against", "col_p_margin", "col_p", "col_planned", "col_runs")]
    table = Table("plan-tests", columns, numeric=(3, 4, 5), caption=say("plan_reading", **values))
    numbered = set(analysis.runs)  # a run that equals one counted before it has no number of its own
    for tested in confirmed.tested:
        table.add(
            tested.hypothesis.id,
            Cell(tested.hypothesis.arm, code=True),
            Cell(tested.hypothesis.against, code=True),
            numbers.p_value(tested.p),
            numbers.p_value(tested.adjusted),
            _counts(tested, say),
            Cell("", handles(analysis, tuple(run for run in tested.runs if run in numbered))),
        )
    return table


def _change(tested: Tested) -> str:
    return "–" if tested.change is None else numbers.percent(tested.change.mean, 2)


def _interval(tested: Tested, say: Words) -> str:
    """Return the interval of the change over seeds, or why there is none."""
    change = tested.change
    if change is None or change.low is None or change.high is None:
        return "–" if change is None else say("one_seed_short" if change.n == 1 else "no_spread_short")
    return f"{numbers.percent(change.low, 2)} – {numbers.percent(change.high, 2)}"


def _counts(tested: Tested, say: Words) -> str:
    """Return the pairs, or the seeds of both arms, against those planned."""
    key = "plan_pairs" if tested.hypothesis.test == "paired" else "plan_seeds"
    shares = [say("seeds_left", left=left, all=planned) for left, planned in tested.counts]
    return say(key, counts=" / ".join(shares))


def _missing(planned: PlannedRuns, say: Words) -> str:
    return say("plan_missing", runs=count_text("run", len(planned.missing), say), running=len(planned.running))


def _runs_texts(planned: PlannedRuns, say: Words) -> list[str]:
    """Return sentences about the planned runs that were lost, and about those that are not of this plan."""
    texts = []
    if planned.lost:
        named = [say("in_brackets", text=name, more=say(f"kind_{kind}")) for name, kind in planned.lost.items()]
        texts.append(say("plan_lost", runs=count_text("run", len(named), say), named=say("list").join(named)))
    why = Counter(run.why for run in planned.apart)
    use = say("plan_used" if planned.any_version else "plan_unused")
    if why[BEFORE] + why[VERSION]:
        runs = count_text("run", why[BEFORE] + why[VERSION], say)
        texts.append(say("plan_apart", runs=runs, before=why[BEFORE], version=why[VERSION], use=use))
    if why[SETTINGS]:
        texts.append(say("plan_settings", runs=count_text("run", why[SETTINGS], say), use=use))
    return texts


def plan_data(confirmed: Confirmed) -> dict[str, Any]:
    """Return the plan's verdicts and runs as data."""
    planned = confirmed.planned
    confirmation = planned.study.confirmation
    return {
        "name": planned.study.path.name,
        "sha256": planned.study.sha256,
        "judges": confirmation.judges,
        "alpha": confirmation.alpha,
        "any_version": planned.any_version,
        "planned": list(planned.study.configs),
        "finished": {name: str(run.path) for name, run in planned.finished.items()},
        "lost": planned.lost,
        "missing": list(planned.missing),
        "running": list(planned.running),
        "apart": [{"run": run.name, "path": str(run.path), "why": run.why} for run in planned.apart],
        "not_in_the_plan": planned.others,
        "command": planned.command if planned.missing else None,
        "hypotheses": [_tested_data(tested) for tested in confirmed.tested],
        "shown": [
            {"title": shown.title, "reference": shown.reference_id, "arms": [_arm_data(arm) for arm in shown.arms]}
            for shown in confirmed.shown
        ],
    }


def _arm_data(shown: Shown) -> dict[str, Any]:
    return {
        "arm": shown.id,
        "name": shown.name,
        "change": None if shown.change is None else asdict(shown.change),
        "narrow": shown.narrow,
        "over_texts": shown.over_texts,
        "pairs": len(shown.pairs),
    }


def _tested_data(tested: Tested) -> dict[str, Any]:
    return {
        **tested.hypothesis.model_dump(),
        "verdict": tested.verdict,
        "change": None if tested.change is None else asdict(tested.change),
        "over_texts": tested.over_texts,
        "p": tested.p,
        "p_holm": tested.adjusted,
        "counts": [{"judged": left, "planned": all_} for left, all_ in tested.counts],
        "lost": {side.arm: sorted(side.lost) for side in (tested.arm, tested.against) if side.lost},
        "missing": {side.arm: list(side.missing) for side in (tested.arm, tested.against) if side.missing},
        "notes": [{"code": note.code, **dict(note.values)} for note in tested.notes],
    }
