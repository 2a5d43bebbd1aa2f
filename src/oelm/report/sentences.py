"""What the runs show, in plain words: one sentence for each comparison and each verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ..analysis import Analysis
from ..analysis.arms import Setup
from ..analysis.compare import Comparison, Note
from ..analysis.hypotheses import REFUTED, SUPPORTED, Verdict
from ..analysis.run import LeftOut
from ..analysis.stats import ALPHA
from . import numbers
from .words import Words, words

# Notes on a comparison that a summary must not leave out.
_DOUBTS = ("edge_low", "edge_high", "better_elsewhere")
# Settings that go with a run's length: a longer one warms up longer and is looked at less often.
_FOLLOW_LENGTH = ("eval.every", "optimizer.warmup_steps")
# Values that change nothing, and so add nothing to a name where another setup has others.
_NEUTRAL = {"data.fraction": "1.0", "optimizer.layer_decay": "1.0", "model.fields": "{}"}


def summary(analysis: Analysis, language: str = "en") -> list[str]:
    """The report's summary as lines of text, for a terminal."""
    say = words(language)
    lines = [*opening(analysis, say)]
    told = [sentence(one, analysis, say) for one in analysis.comparisons]
    lines += ["", say("heading_of", head=say("what_differs")), *(f"- {line}" for line in told)] if told else []
    judged = by_verdict(analysis)
    for key, verdicts in judged if any(found for _, found in judged) else []:
        lines += ["", say("heading_of", head=say(key))]
        lines += [f"- {verdict_line(one, analysis, say)}" for one in verdicts] or [f"- {say('nothing')}"]
    scenarios = scenario_lines(analysis, say)
    return lines + (["", *scenarios] if scenarios else [])


def opening(analysis: Analysis, say: Words) -> list[str]:
    """How much there is, and what must be known about the data before anything else."""
    methods = len({run.method for run in analysis.runs})
    counts = {"runs": so_many("run", len(analysis.runs), say), "methods": so_many("method", methods, say)}
    left = len(analysis.left_out)
    found = Counter(item.kind for item in analysis.left_out)
    kinds = ", ".join(f"{say(f'kind_{kind}')} {count}" for kind, count in sorted(found.items()))
    lines = [say("counted", left=left, kinds=kinds, **counts) if left else say("counted_all", **counts)]
    if analysis.running:
        lines.append(say("still_running", runs=so_many("run", len(analysis.running), say)))
    for group in analysis.groups:
        setup = group.setups[0]
        if setup.runs[0].synthetic:
            lines.append(say("synthetic", dataset=group.dataset))
        elif setup.stand_in:
            lines.append(say("stand_in", dataset=group.dataset))
        if not any(one.reference for one in group.setups) and len(group.setups[0].arms) > 1:
            lines.append(say("no_reference", dataset=group.dataset))
    return lines


def so_many(what: str, count: int, say: Words) -> str:
    """A number of runs or methods in words."""
    return say(f"one_{what}") if count == 1 else say(f"many_{what}s", count=count)


def sentence(one: Comparison, analysis: Analysis, say: Words) -> str:
    """A comparison in words: how much, how sure, on what basis, and what follows."""
    basis = say(f"basis_{one.basis}", rate=numbers.rate(one.rate), reference_rate=numbers.rate(one.reference_rate))
    text = say(
        "sentence",
        arm=one.arm,
        reference=one.reference,
        measure=say(f"m_{one.measure.name}"),
        change=numbers.change(one, say),
        interval=numbers.interval(one, say),
        basis=basis,
        verdict=reading(one, say),
    )
    doubts = [note_text(note, say) for note in one.notes if note.code in _DOUBTS]
    if doubts:
        text = say("but", sentence=text, doubts=say("and_then").join(doubts))
    where = place(one.setup, analysis)
    return say("sentence_on", dataset=where, sentence=text) if where else text


def reading(one: Comparison, say: Words) -> str:
    """What follows from a comparison, in a sentence."""
    if not one.sound:
        return say("says_confounded", fields=", ".join(item.field for item in one.confounds))
    if not one.pairs:
        return say("says_unpaired")
    if one.no_spread:
        return say("says_no_spread")
    if one.adjusted is None:
        return say("says_one_seed")
    parts = []
    if one.conclusive:
        parts.append(say("says_better" if one.winner == one.arm else "says_worse"))
    if one.alike is not None and one.alike < ALPHA:
        parts.append(say("says_alike", margin=numbers.margin(one.measure.name)))
    if parts:
        return " ".join(parts)
    if one.p is not None and one.p < ALPHA:
        return say("says_open_corrected", p=numbers.p_value(one.adjusted))
    return say("says_open")


def short_reading(one: Comparison, say: Words) -> tuple[str, str]:
    """The same in a word, and its tone."""
    if not one.sound:
        return say("basis_confounded_short"), "open"
    if one.no_spread:
        return say("undecided"), "open"
    if one.adjusted is None:
        return say("one_seed_short") if one.pairs else say("no_pair_short"), "open"
    alike = one.alike is not None and one.alike < ALPHA
    if one.conclusive:
        better = one.winner == one.arm
        word = say("better" if better else "worse")
        if alike:
            word = say("within", reading=word, margin=numbers.margin(one.measure.name))
        return word, "good" if better else "bad"
    if alike:
        return say("within", reading=say("alike"), margin=numbers.margin(one.measure.name)), "good"
    return say("undecided"), "open"


def by_verdict(analysis: Analysis) -> list[tuple[str, list[Verdict]]]:
    """The verdicts that had runs, by what came of them."""
    had = [one for one in analysis.verdicts if one.found is not None or one.runs]
    return [
        ("what_holds", [one for one in had if one.verdict == SUPPORTED]),
        ("what_fails", [one for one in had if one.verdict == REFUTED]),
        ("what_is_open", [one for one in had if one.verdict not in (SUPPORTED, REFUTED)]),
    ]


def verdict_line(verdict: Verdict, analysis: Analysis, say: Words) -> str:
    """A verdict in words: the hypothesis and its numbers."""
    title = say("headed", head=verdict.hypothesis.id, text=verdict.hypothesis.text(say.language))
    return say("verdict_line", title=title, numbers=verdict_numbers(verdict, analysis, say))


def verdict_numbers(verdict: Verdict, analysis: Analysis, say: Words) -> str:
    text = numbers.found(verdict, say) if verdict.found is not None else ""
    extra = [note_text(note, say) for note in verdict.notes if note.code != "one_seed"]
    if verdict.beside is not None and verdict.hypothesis.beside is not None:
        expected = verdict.hypothesis.beside
        extra.append(
            say(
                "beside",
                measure=say(f"m_{expected.measure}"),
                value=numbers.figure(expected.measure, verdict.beside),
                expected=numbers.figure(expected.measure, expected.expected),
            )
        )
    corrected = verdict.adjusted is not None and verdict.p is not None and verdict.p < ALPHA <= verdict.adjusted
    if corrected:
        extra.append(say("corrected_away", towards=say(verdict.towards), p=numbers.p_value(verdict.adjusted)))
    where = place(verdict.setup, analysis) if verdict.setup is not None else ""
    if where and text:
        text = say("numbers_on", numbers=text, where=where)
    return say("and_then").join([*([text] if text else []), *extra])


def scenario_lines(analysis: Analysis, say: Words) -> list[str]:
    """The plan's scenario that the runs select, for each setup that could."""
    lines = []
    for verdict in analysis.verdicts:
        if verdict.hypothesis.scenarios and verdict.found is not None:
            text = say(f"scenario_{verdict.scenario or 'none'}")
            where = place(verdict.setup, analysis) if verdict.setup is not None else ""
            lines.append(say("sentence_on", dataset=where, sentence=text) if where else text)
    return lines


def place(setup: Setup, analysis: Analysis) -> str:
    """What tells a setup from the others of a report; nothing where there is only one."""
    several = len(analysis.groups) > 1 or any(len(group.setups) > 1 for group in analysis.groups)
    return setup_name(setup) if several else ""


def setup_name(setup: Setup) -> str:
    """The data, and the settings in which this setup differs from the others on the same data."""
    return ", ".join([setup_data(setup), *setup_settings(setup)])


def setup_data(setup: Setup) -> str:
    """The data, with the task where its name does not say it."""
    told = setup.task.name == "language" or _letters(setup.task.name) in _letters(setup.dataset)
    return setup.dataset if told else f"{setup.task.name}: {setup.dataset}"


def setup_settings(setup: Setup) -> list[str]:
    """The settings in which a setup differs from the others on the same data, so many that no two have one name."""
    told = _few(setup.apart)
    twins = [dict(other) for other in setup.others if _few(other) == told]
    more = [f"{field} {value}" for field, value in setup.apart if any(twin[field] != value for twin in twins)]
    return told + [setting for setting in more if setting not in told][:2]


def _few(apart: tuple[tuple[str, str], ...]) -> list[str]:
    """The settings that a name usually needs: many hashes may differ at once, and some settings go with others."""
    fields = {field: value for field, value in apart if not field.startswith("environment.")}
    if "train.max_steps" in fields:
        fields = {field: value for field, value in fields.items() if field not in _FOLLOW_LENGTH}
    told = {field: value for field, value in fields.items() if value not in (_NEUTRAL.get(field), "null")}
    return [f"{field} {value}" for field, value in told.items()][:4]


def _letters(text: str) -> str:
    """A name without what spellings differ in: SST-2 is sst2."""
    return "".join(char for char in text.lower() if char.isalnum())


def note_text(note: Note, say: Words) -> str:
    return say(f"note_{note.code}", **dict(note.values))


def comparison_notes(one: Comparison, say: Words) -> list[str]:
    """Everything that a reader must know about a comparison."""
    notes = [note_text(note, say) for note in one.notes if note.code != "one_seed"]
    if one.confounds:
        told = ", ".join(f"{item.field} ({item.one} / {item.other})" for item in one.confounds)
        notes.append(say("note_confounded", fields=told))
    if one.cautions:
        notes.append(say("note_cautions", fields=", ".join(item.field for item in one.cautions)))
    return notes


def shared_notes(comparisons: Sequence[Comparison], say: Words) -> list[tuple[str, list[Comparison]]]:
    """The notes on several comparisons, each once, headed by the arms that it is about; and those comparisons."""
    about: dict[str, list[Comparison]] = {}
    for one in comparisons:
        for note in comparison_notes(one, say):
            about.setdefault(note, []).append(one)
    told: dict[str, list[str]] = {}
    for note, meant in about.items():
        told.setdefault(_arms_meant(meant, comparisons, say), []).append(note)
    return [
        (say("headed", head=head, text=say("and_then").join(notes)), about[notes[0]]) for head, notes in told.items()
    ]


def _arms_meant(about: Sequence[Comparison], comparisons: Sequence[Comparison], say: Words) -> str:
    """Some of the arms compared, by name, or by the names of the others where those are fewer."""
    named = [one.arm for one in about]
    others = [one.arm for one in comparisons if one.arm not in named]
    if len(about) == 1 or len(others) >= len(about):
        return ", ".join(named)
    return say("every_arm_but", arms=", ".join(others)) if others else say("every_arm")


def why_left_out(item: LeftOut, say: Words) -> str:
    """Why a run does not count; what a failed or damaged one said is quoted as it is."""
    if item.kind in ("damaged", "failed"):
        return item.reason
    return say(f"why_{item.kind}", **dict(item.values))
