"""What a look inside a model found: the figures of every head on given texts, as look.json holds them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..method.spec import Kind as Kind
from .schema import Record, RecordPart

# What is measured of a head's map on a text, as shares from 0 to 1, in the order of tables and figures.
MEASURES = ("previous", "itself", "first", "prefix_matching", "entropy")


@dataclass(frozen=True, eq=False)
class LayerMap:
    """The attention weights of a layer's heads on one text: (heads, queries, keys), rows sum to 1."""

    kind: Kind
    layer: int
    weights: npt.NDArray[np.float32]


class HeadName(RecordPart):
    """Which head: the kind of its attention, its layer and its number."""

    kind: Kind
    layer: int
    head: int


class HeadLook(HeadName):
    """The figures of a head. What a kind of attention or a text has no value for is None.

    previous, itself, first     share of attention on the token before, the token itself, the first token
    prefix_matching             share on the tokens that followed earlier occurrences of the same token
    entropy                     mean entropy as a share of its maximum, the logarithm of the number of visible keys
    spread                      of each of these, the largest value on a text less the smallest; {} with one text
    induction                   on random tokens that are repeated: share on the token after the earlier copy
    effective_rank, rank        of W_qᵀ W_k: the exponential of its singular values' entropy; how many are not zero
    full_rank                   the largest rank that its matrices' shapes allow
    """

    previous: float | None = None
    itself: float | None = None
    first: float | None = None
    prefix_matching: float | None = None
    entropy: float | None = None
    spread: dict[str, float | None] = {}
    induction: float | None = None
    effective_rank: float | None = None
    rank: int | None = None
    full_rank: int | None = None


class TextLook(RecordPart):
    """One text as the model reads it, and the figures of every head on it. `text` is None for a task's own tokens."""

    text: str | None
    tokens: list[str]
    target_tokens: list[str] | None = None
    heads: list[HeadLook]


class ModelLook(RecordPart):
    """The figures of one model: over all texts in `heads`, and on each text.

    `without_cross` says that its cross-attention was left out, because it reads the states of another model.
    """

    source: str
    model: str
    model_class: str
    family: str
    heads: list[HeadLook]
    texts: list[TextLook]
    without_cross: bool = False


class HeadDifference(HeadName):
    """The second model's figures less the first's, and the mean total-variation distance between their maps.

    The distance is None where the models read other tokens.
    """

    differences: dict[str, float | None]
    distance: float | None


class HeadDrift(HeadName):
    """How far a head's maps at each checkpoint are from those at the last one: mean total-variation distances."""

    distances: list[float]


class Drift(RecordPart):
    """The drift of all heads over the checkpoints of a run, at these steps."""

    steps: list[int]
    heads: list[HeadDrift]


class Look(Record):
    """Everything that `oelm look` found: one model, or two with their differences, or one with its checkpoints.

    `git_commit` is the commit of the code that looked, None outside a checkout.
    """

    git_commit: str | None = None
    models: list[ModelLook]
    differences: list[HeadDifference] = []
    drift: Drift | None = None
