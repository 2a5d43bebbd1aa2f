"""What sums and counts say: perplexity; of a confusion matrix accuracy, macro-F1, Matthews, and whether it is chance.

Pure functions, so that figures add up over batches and processes, and can be computed again from a record.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Counts = npt.NDArray[np.int64]
# Two-sided 95 % of a normal distribution.
_Z = 1.959963984540054


def perplexity(loss: float) -> float:
    """e to the loss; infinite where that overflows."""
    return math.inf if loss > 700 else math.exp(loss)


def classification_figures(confusion: Counts, labels: Sequence[str]) -> dict[str, Any]:
    """The figures of a confusion matrix, whose rows are the true classes and whose columns the predicted ones."""
    total, hits = int(confusion.sum()), np.diag(confusion)
    support, predicted = confusion.sum(1), confusion.sum(0)
    precision, recall = _share(hits, predicted), _share(hits, support)
    f1 = _share(2 * hits, support + predicted)
    accuracy, commonest = float(hits.sum()) / total, majority(support.tolist(), labels)
    return {
        "accuracy": accuracy,
        "majority": commonest,
        "at_chance": is_at_chance(accuracy, total, commonest["accuracy"]),
        "macro_f1": float(f1.mean()),
        "matthews": matthews(confusion),
        "n": total,
        "confusion": confusion.tolist(),
        "per_class": {
            label: {
                "support": int(support[i]),
                "predicted": int(predicted[i]),
                "precision": float(precision[i]),
                "recall": float(recall[i]),
                "f1": float(f1[i]),
            }
            for i, label in enumerate(labels)
        },
    }


def matthews(confusion: Counts) -> float:
    """The correlation between truth and prediction over any number of classes; 0 where either is always the same."""
    counts = confusion.astype(np.float64)
    total, truth, said = counts.sum(), counts.sum(1), counts.sum(0)
    spread = (total**2 - (truth**2).sum()) * (total**2 - (said**2).sum())
    if spread <= 0:
        return 0.0
    return float((np.trace(counts) * total - (truth * said).sum()) / math.sqrt(spread))


def majority(counts: Sequence[int], labels: Sequence[str]) -> dict[str, Any]:
    """What always answering the most frequent class would score."""
    most = int(np.argmax(counts))
    return {"label": labels[most], "accuracy": int(counts[most]) / sum(counts)}


def accuracy_interval(accuracy: float, n: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share of n."""
    centre = (accuracy + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(accuracy * (1 - accuracy) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    return centre - half, centre + half


def is_at_chance(accuracy: float, n: int, majority_accuracy: float) -> bool:
    """Whether an accuracy on n examples is within noise of always answering the most frequent class, or below it."""
    return accuracy_interval(accuracy, n)[0] <= majority_accuracy


def _share(part: Counts, whole: Counts) -> npt.NDArray[np.float64]:
    """part / whole, and 0 where there is nothing to take a share of."""
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)
