"""How much a comparison depends on the texts that it was judged on: an interval over the documents of the test text."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .run import Run
from .stats import CONFIDENCE, cluster_bootstrap

# With fewer documents, what a few of them are about decides, and resampling them shows too little of that.
_FEWEST = 10


def over_texts(pairs: Sequence[tuple[Run, Run]]) -> tuple[float, float] | None:
    """Return the interval over texts of the mean log ratio of the pairs' test perplexities.

    Whole documents are drawn, since the tokens of one share its subject and its style. The runs stay the same, so the
    interval says nothing about other seeds. None where a run has no losses by document, or of other documents.
    """
    return over_texts_of([run for run, _ in pairs], [reference for _, reference in pairs])


def over_texts_of(
    runs: Sequence[Run], references: Sequence[Run], confidence: float = CONFIDENCE
) -> tuple[float, float] | None:
    """Return the same interval for the mean of some runs against that of others, which need not be pairs."""
    recorded = [_by_document(run) for run in (*runs, *references)]
    known = [losses for losses in recorded if losses is not None]
    if not runs or not references or len(known) < len(recorded):
        return None
    tokens = known[0][1]
    if len(tokens) < _FEWEST or any(other != tokens for _, other in known):
        return None
    losses = np.array([document_losses for document_losses, _ in known])
    difference = losses[: len(runs)].mean(axis=0) - losses[len(runs) :].mean(axis=0)
    return cluster_bootstrap(difference, tokens, confidence)


def _by_document(run: Run) -> tuple[list[float], list[int]] | None:
    test = run.result.evaluations.get("test")
    if test is None or test.document_losses is None or test.document_tokens is None:
        return None
    return test.document_losses, test.document_tokens
