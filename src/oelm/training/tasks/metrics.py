"""Metrics from sums and counts: perplexity, and from a confusion matrix accuracy, macro-F1, Matthews and chance level.

Pure functions, so that metrics add up over batches and processes and can be computed again from a record.
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
    """Return e to the loss; infinite where that overflows."""
    return math.inf if loss > 700 else math.exp(loss)


def classification_metrics(confusion: Counts, labels: Sequence[str]) -> dict[str, Any]:
    """Compute the metrics of a confusion matrix, with the true classes as rows and the predicted ones as columns."""
    total, hits = int(confusion.sum()), np.diag(confusion)
    support, predicted = confusion.sum(1), confusion.sum(0)
    precision, recall = _share(hits, predicted), _share(hits, support)
    f1 = _share(2 * hits, support + predicted)
    accuracy, most_frequent = float(hits.sum()) / total, majority(support.tolist(), labels)
    return {
        "accuracy": accuracy,
        "majority": most_frequent,
        "at_chance": is_at_chance(accuracy, total, most_frequent["accuracy"]),
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
    """Return the Matthews correlation of true and predicted classes; 0 where either is always the same class."""
    counts = confusion.astype(np.float64)
    total, true, predicted = counts.sum(), counts.sum(1), counts.sum(0)
    spread = (total**2 - (true**2).sum()) * (total**2 - (predicted**2).sum())
    if spread <= 0:
        return 0.0
    return float((np.trace(counts) * total - (true * predicted).sum()) / math.sqrt(spread))


def majority(counts: Sequence[int], labels: Sequence[str]) -> dict[str, Any]:
    """Return the most frequent class and the accuracy of always predicting it."""
    most = int(np.argmax(counts))
    return {"label": labels[most], "accuracy": int(counts[most]) / sum(counts)}


def accuracy_interval(accuracy: float, n: int) -> tuple[float, float]:
    """Return Wilson's 95 % interval of an accuracy on n examples."""
    centre = (accuracy + _Z**2 / (2 * n)) / (1 + _Z**2 / n)
    half = _Z * math.sqrt(accuracy * (1 - accuracy) / n + _Z**2 / (4 * n**2)) / (1 + _Z**2 / n)
    return centre - half, centre + half


def is_at_chance(accuracy: float, n: int, majority_accuracy: float) -> bool:
    """Return True unless an accuracy on n examples is clearly above that of always predicting the majority class."""
    return accuracy_interval(accuracy, n)[0] <= majority_accuracy


def _share(part: Counts, whole: Counts) -> npt.NDArray[np.float64]:
    """Return part / whole, and 0 where whole is 0."""
    return np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0)
