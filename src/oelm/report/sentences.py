"""Put into words what the runs show: a sentence for each comparison and each verdict."""

from __future__ import annotations

import re
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

# The notes on a comparison that the summary repeats.
_DOUBTS = ("edge_low", "edge_high", "better_elsewhere")
# Settings that follow from the length of a run: a longer run warms up longer and is evaluated less often.
_FOLLOW_LENGTH = ("eval.every", "optimizer.warmup_steps")
# Values that mean "not used". A setup's name leaves them out, even when another setup has other values.
_NEUTRAL = {"data.fraction": "1.0", "optimizer.layer_decay": "1.0", "optimizer.name": "adamw", "model.fields": "{}"}

_WHOLE = re.compile(r"\d+(\.0)?")


def summary(analysis: Analysis, language: str = "en") -> list[str]:
    """Return the summary of a report as lines of text, for a terminal."""
    say = words(language)
    lines = [*opening(analysis, say)]
    differences = [f"- {sentence(comparison, analysis, say)}" for comparison in analysis.comparisons]
    lines += ["", say("heading_of", head=say("what_differs")), *differences] if differences else []
    return [*lines, *verdict_lines(analysis, say)]


def verdict_lines(analysis: Analysis, say: Words) -> list[str]:
    """Return which hypotheses hold, which do not and which are undecided, and the scenarios that this selects."""
    lines, judged = [], by_verdict(analysis)
    for key, verdicts in judged if any(verdicts for _, verdicts in judged) else []:
        lines += ["", say("heading_of", head=say(key))]
        lines += [f"- {verdict_line(verdict, analysis, say)}" for verdict in verdicts] or [f"- {say('nothing')}"]
    scenarios = scenario_lines(analysis, say)
    return lines + (["", *scenarios] if scenarios else [])


def opening(analysis: Analysis, say: Words) -> list[str]:
    """Return how many runs there are, and what a reader must know about the data before anything else."""
    methods = len({run.method for run in analysis.runs})
    counts = {"runs": count_text("run", len(analysis.runs), say), "methods": count_text("method", methods, say)}
    left = len(analysis.left_out)
    counts_by_kind = Counter(item.kind for item in analysis.left_out)
    kinds = ", ".join(f"{say(f'kind_{kind}')} {count}" for kind, count in sorted(counts_by_kind.items()))
    lines = [say("counted", left=left, kinds=kinds, **counts) if left else say("counted_all", **counts)]
    if analysis.running:
        lines.append(say("still_running", runs=count_text("run", len(analysis.running), say)))
    for group in analysis.groups:
        setup = group.setups[0]
        if setup.runs[0].synthetic:
            lines.append(say("synthetic", dataset=group.dataset))
        elif setup.stand_in:
            lines.append(say("stand_in", dataset=group.dataset))
        if not any(candidate.reference for candidate in group.setups) and len(group.setups[0].arms) > 1:
            lines.append(say("no_reference", dataset=group.dataset))
    return lines


def count_text(what: str, count: int, say: Words) -> str:
    """Return a number of runs or methods in words: '1 run', '3 methods'."""
    return say(f"one_{what}") if count == 1 else say(f"many_{what}s", count=count)


def sentence(comparison: Comparison, analysis: Analysis, say: Words) -> str:
    """Return a comparison as a sentence: the change, its interval, the learning rates, and the conclusion."""
    basis = say(
        f"basis_{comparison.basis}",
        rate=numbers.rate(comparison.rate),
        reference_rate=numbers.rate(comparison.reference_rate),
    )
    text = say(
        "sentence",
        arm=comparison.arm,
        reference=comparison.reference,
        measure=say(f"m_{comparison.measure.name}"),
        change=numbers.change(comparison, say),
        interval=numbers.interval(comparison, say),
        basis=basis,
        verdict=conclusion(comparison, say),
    )
    doubts = [note_text(note, say) for note in comparison.notes if note.code in _DOUBTS]
    if doubts:
        text = say("but", sentence=text, doubts=say("and_then").join(doubts))
    where = setup_label(comparison.setup, analysis, say)
    return say("sentence_on", dataset=where, sentence=text) if where else text


def conclusion(comparison: Comparison, say: Words) -> str:
    """Return the conclusion of a comparison as a sentence."""
    if not comparison.sound:
        return say("says_confounded", fields=", ".join(item.field for item in comparison.confounds))
    if not comparison.pairs:
        return say("says_unpaired")
    if comparison.no_spread:
        return say("says_no_spread")
    if comparison.adjusted is None:
        return say("says_one_seed")
    parts = []
    if comparison.conclusive:
        parts.append(say("says_better" if comparison.winner == comparison.arm else "says_worse"))
    if comparison.alike is not None and comparison.alike < ALPHA:
        parts.append(say("says_alike", margin=numbers.margin(comparison.measure.name, say)))
    if parts:
        return say.in_a_row(parts)
    if comparison.p is not None and comparison.p < ALPHA:
        return say("says_open_corrected", p=numbers.p_value(comparison.adjusted))
    return say("says_open")


def short_conclusion(comparison: Comparison, say: Words) -> tuple[str, str]:
    """Return the conclusion of a comparison in a word, and its tone."""
    if not comparison.sound:
        return say("basis_confounded_short"), "open"
    if comparison.no_spread:
        return say("undecided"), "open"
    if comparison.adjusted is None:
        return say("one_seed") if comparison.pairs else say("no_pair"), "open"
    alike = comparison.alike is not None and comparison.alike < ALPHA
    if comparison.conclusive:
        better = comparison.winner == comparison.arm
        word = say("better" if better else "worse")
        if alike:
            word = say("within", reading=word, margin=numbers.margin(comparison.measure.name, say))
        return word, "good" if better else "bad"
    if alike:
        return say("within", reading=say("alike"), margin=numbers.margin(comparison.measure.name, say)), "good"
    return say("undecided"), "open"


def by_verdict(analysis: Analysis) -> list[tuple[str, list[Verdict]]]:
    """Return the verdicts that have runs, by their outcome: the key of a heading, and the verdicts below it."""
    judged = [verdict for verdict in analysis.verdicts if verdict.estimate is not None or verdict.runs]
    return [
        ("what_holds", [verdict for verdict in judged if verdict.verdict == SUPPORTED]),
        ("what_fails", [verdict for verdict in judged if verdict.verdict == REFUTED]),
        ("what_is_open", [verdict for verdict in judged if verdict.verdict not in (SUPPORTED, REFUTED)]),
    ]


def verdict_line(verdict: Verdict, analysis: Analysis, say: Words) -> str:
    """Return a verdict as a line: the hypothesis and its numbers."""
    title = say("headed", head=verdict.hypothesis.id, text=verdict.hypothesis.text(say.language))
    return say("verdict_line", title=title, numbers=verdict_numbers(verdict, analysis, say))


def verdict_numbers(verdict: Verdict, analysis: Analysis, say: Words) -> str:
    """Return the numbers of a verdict, the setup in which they were measured, and what else a reader must know."""
    text = numbers.verdict_value(verdict, say) if verdict.estimate is not None else ""
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
    where = setup_label(verdict.setup, analysis, say) if verdict.setup is not None else ""
    if where and text:
        text = say("numbers_on", numbers=text, where=where)
    return say("and_then").join([*([text] if text else []), *extra])


def scenario_lines(analysis: Analysis, say: Words) -> list[str]:
    """Return which scenario of the plan the runs select, a line for each setup that can select one."""
    lines = []
    for verdict in analysis.verdicts:
        if verdict.hypothesis.scenarios and verdict.estimate is not None:
            text = say(f"scenario_{verdict.scenario or 'none'}")
            where = setup_label(verdict.setup, analysis, say) if verdict.setup is not None else ""
            lines.append(say("sentence_on", dataset=where, sentence=text) if where else text)
    return lines


def setup_label(setup: Setup, analysis: Analysis, say: Words) -> str:
    """Return the name of a setup, or nothing when it is the only one of the report."""
    several = len(analysis.groups) > 1 or any(len(group.setups) > 1 for group in analysis.groups)
    return setup_name(setup, say) if several else ""


def setup_name(setup: Setup, say: Words) -> str:
    """Return the data of a setup, and the settings in which it differs from the others on the same data."""
    return ", ".join([setup_data(setup), *setup_settings(setup, say)])


def setup_briefly(setup: Setup, analysis: Analysis, say: Words) -> str:
    """Return the beginning of the data's name if several data sets are compared, and the settings; may be empty."""
    one_dataset = len({comparison.setup.dataset for comparison in analysis.comparisons}) == 1
    dataset = [] if one_dataset else [setup.dataset.split(",")[0].split(":")[0]]
    return ", ".join([*dataset, *setup_settings(setup, say)])


def setup_data(setup: Setup) -> str:
    """Return the data of a setup, with the task when the name of the data does not contain it."""
    has_task = setup.task.name == "language" or _letters(setup.task.name) in _letters(setup.dataset)
    return setup.dataset if has_task else f"{setup.task.name}: {setup.dataset}"


def setup_settings(setup: Setup, say: Words) -> list[str]:
    """Return the settings in which a setup differs from others on the same data, enough to make its name unique."""
    few = _few(setup.apart)
    twins = [dict(other) for other in setup.others if _few(other) == few]
    more = [(field, value) for field, value in setup.apart if any(twin[field] != value for twin in twins)]
    settings = few + [setting for setting in more if setting not in few][:2]
    return [setting_text(field, value, say) for field, value in settings]


def setting_text(field: str, value: object, say: Words) -> str:
    """Return a setting in words: "2,000 steps" for train.max_steps 2000, "latent 256" for model.fields.latent 256."""
    text = str(value)
    if _WHOLE.fullmatch(text):
        text = f"{int(float(text)):,}"
    if (key := f"set_{field}") in say.texts:
        return say(key, value=text)
    name = field.removeprefix("environment.data.").removeprefix("model.fields.")
    name = name if name != field else field.partition(".")[2]
    return f"{name.replace('_', ' ').replace('.', ' ')} {text}"


def _few(apart: tuple[tuple[str, str], ...]) -> list[tuple[str, str]]:
    """Return at most four settings for a name.

    Those that follow from others are left out, and so are hashes of the environment, of which many differ at once.
    """
    fields = {field: value for field, value in apart if not field.startswith("environment.")}
    if "train.max_steps" in fields:
        fields = {field: value for field, value in fields.items() if field not in _FOLLOW_LENGTH}
    in_use = {field: value for field, value in fields.items() if value not in (_NEUTRAL.get(field), "null")}
    return list(in_use.items())[:4]


def _letters(text: str) -> str:
    """Return a name in lower case without punctuation, so that SST-2 and sst2 are the same."""
    return "".join(char for char in text.lower() if char.isalnum())


def note_text(note: Note, say: Words) -> str:
    """Return a note in words."""
    return say(f"note_{note.code}", **dict(note.values))


def comparison_notes(comparison: Comparison, say: Words) -> list[str]:
    """Return everything that a reader must know about a comparison, in words."""
    notes = [note_text(note, say) for note in comparison.notes if note.code != "one_seed"]
    if comparison.confounds:
        fields = ", ".join(
            f"{field_text(item.field, say)} ({item.one} / {item.other})" for item in comparison.confounds
        )
        notes.append(say("note_confounded", fields=fields))
    if comparison.cautions:
        fields = say("list").join(field_text(item.field, say) for item in comparison.cautions)
        notes.append(say("note_cautions", fields=fields))
    return notes


def field_text(field: str, say: Words) -> str:
    """Return what a run recorded of its environment in words; a field of the config by the name that it has there."""
    key = f"field_{field.removeprefix('environment.')}"
    return say(key) if key in say.texts else field


def shared_notes(comparisons: Sequence[Comparison], say: Words) -> list[tuple[str, list[Comparison]]]:
    """Return the notes on several comparisons, each once, with the arms in front and the comparisons it is about."""
    comparisons_by_note: dict[str, list[Comparison]] = {}
    for comparison in comparisons:
        for note in comparison_notes(comparison, say):
            comparisons_by_note.setdefault(note, []).append(comparison)
    by_arms: dict[str, list[str]] = {}
    for note, concerned in comparisons_by_note.items():
        by_arms.setdefault(_arms_text(concerned, comparisons, say), []).append(note)
    return [
        (_headed(head, say("and_then").join(notes), say), comparisons_by_note[notes[0]])
        for head, notes in by_arms.items()
    ]


def _headed(head: str, text: str, say: Words) -> str:
    """Return a text with the arms that it is about in front, unless it begins with them itself."""
    return text if text.startswith(f"{head} ") else say("headed", head=head, text=text)


def _arms_text(about: Sequence[Comparison], comparisons: Sequence[Comparison], say: Words) -> str:
    """Return the names of the arms in `about`, or "every arm but ..." when that is shorter."""
    named = [comparison.arm for comparison in about]
    others = [comparison.arm for comparison in comparisons if comparison.arm not in named]
    if len(about) == 1 or len(others) >= len(about):
        return ", ".join(named)
    return say("every_arm_but", arms=", ".join(others)) if others else say("every_arm")


def why_left_out(item: LeftOut, say: Words) -> str:
    """Return why a run is not counted. The message of a failed or damaged run is quoted as it is."""
    if item.kind in ("damaged", "format", "failed"):
        return item.reason
    return say(f"why_{item.kind}", **dict(item.values))
