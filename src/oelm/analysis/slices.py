"""Where the loss of an arm lies: its difference to the reference in every slice of the held-out text.

What the slices are is said where they are computed, in training/tasks/slices.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Literal

from .compare import Comparison
from .run import Run, finite
from .stats import Estimate, estimate

# The texts that are judged: the validation text with the last model, and the test text with the one chosen.
Text = Literal["validation", "test"]
TEXTS: tuple[Text, ...] = ("validation", "test")
# The name of the part, and of its one slice, that is the whole text.
WHOLE = "whole"
# The parts in reading order, and the order of their slices where it is not that of their numbers.
_PARTS = {"recall": ("hit", "rest"), "frequency": ("never", "rare", "common", "frequent"), "repeat": (), "position": ()}


@dataclass(frozen=True, kw_only=True)
class SliceGap:
    """The loss of an arm in one slice against its reference's, in nats per token, over pairs of runs.

    `share` is the slice's share of the tokens, `gap_share` its share of the difference on the whole text, to which the
    slices of a part add up; None where that difference may be zero.
    """

    part: str
    name: str
    share: float
    reference_loss: float
    difference: Estimate
    gap_share: float | None


@dataclass(frozen=True)
class _Slice:
    """A slice with its tokens and its mean loss in both runs of each pair."""

    part: str
    name: str
    tokens: int
    losses: tuple[tuple[float, float], ...]

    @property
    def difference(self) -> Estimate:
        return estimate([a - b for a, b in self.losses], scale=max(abs(loss) for pair in self.losses for loss in pair))


def slice_gaps(comparison: Comparison, text: Text = "validation") -> tuple[SliceGap, ...]:
    """Return the differences on a text as a whole and in each of its slices; none where a run has no slices of it.

    There are none either where the runs were not judged by the same tokens.
    """
    slices = _slices(comparison.pairs, text)
    if not slices:
        return ()
    whole = _whole([item for item in slices if item.part == "recall"])
    gap = whole.difference
    known = gap.mean != 0 if gap.n == 1 else gap.low is not None and gap.high is not None and gap.low * gap.high > 0
    gaps = []
    for item in (whole, *slices):
        share, difference = item.tokens / whole.tokens, item.difference
        gaps.append(
            SliceGap(
                part=item.part,
                name=item.name,
                share=share,
                reference_loss=fmean(reference for _, reference in item.losses),
                difference=difference,
                gap_share=share * difference.mean / gap.mean if known else None,
            )
        )
    return tuple(gaps)


def has_slices(run: Run, text: Text) -> bool:
    """Return True when a run has the losses of a text's slices."""
    return bool(_losses(run, text))


def _whole(parts: Sequence[_Slice]) -> _Slice:
    """Return the whole text from slices that add up to it."""
    weights = [item.tokens for item in parts]
    of_pairs = zip(*(item.losses for item in parts), strict=True)
    losses = tuple((fmean([a for a, _ in pair], weights), fmean([b for _, b in pair], weights)) for pair in of_pairs)
    return _Slice(WHOLE, WHOLE, sum(weights), losses)


def _slices(pairs: Sequence[tuple[Run, Run]], text: Text) -> list[_Slice]:
    """Return the slices of all runs, in reading order; none unless all have the same slices of the same tokens."""
    found = [(_losses(run, text), _losses(reference, text)) for run, reference in pairs]
    tokens = [{key: count for key, (count, _) in losses.items()} for pair in found for losses in pair]
    if not tokens or any(counts != tokens[0] for counts in tokens):
        return []
    return [
        _Slice(*key, tokens[0][key], tuple((own[key][1], reference[key][1]) for own, reference in found))
        for key in sorted(tokens[0], key=_place)
    ]


def _losses(run: Run, text: Text) -> dict[tuple[str, str], tuple[int, float]]:
    """Return the tokens and the mean loss of each slice by part and name; nothing for a loss that was not finite."""
    judged = run.result.last if text == "validation" else run.result.evaluations.get("test")
    recorded = (judged.slices if judged is not None else None) or {}
    rows = [
        (part, name, row.tokens, finite(row.loss)) for part in _PARTS for name, row in recorded.get(part, {}).items()
    ]
    return {(part, name): (tokens, loss) for part, name, tokens, loss in rows if loss is not None}


def _place(key: tuple[str, str]) -> tuple[int, str, int]:
    """Return what sorts slices: by part, within `frequency` by recall, and by the order of names or their numbers."""
    part, name = key
    *before, last = name.split()
    order = _PARTS[part]
    number = order.index(last) if order else int(last.rstrip("+").split("-")[0])
    return list(_PARTS).index(part), " ".join(before), number
