"""Perplexity and classification metrics, against values computed by hand and against their definitions."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from oelm.training.tasks.metrics import (
    accuracy_interval,
    classification_metrics,
    is_at_chance,
    majority,
    matthews,
    perplexity,
)

KNOWN = np.array([[50, 10], [5, 35]])


def test_perplexity_is_exp_of_the_loss():
    assert perplexity(math.log(7)) == pytest.approx(7)
    assert perplexity(1e4) == math.inf
    assert math.isnan(perplexity(math.nan))


def test_metrics_of_two_classes_are_those_computed_by_hand():
    metrics = classification_metrics(KNOWN, ("no", "yes"))
    assert metrics["accuracy"] == 0.85
    assert metrics["n"] == 100
    f1 = (2 * 50 / (60 + 55), 2 * 35 / (40 + 45))
    assert metrics["macro_f1"] == pytest.approx(sum(f1) / 2)
    assert metrics["matthews"] == pytest.approx((50 * 35 - 10 * 5) / math.sqrt(60 * 40 * 55 * 45))
    assert metrics["per_class"]["yes"] == {
        "support": 40,
        "predicted": 45,
        "precision": pytest.approx(35 / 45),
        "recall": 35 / 40,
        "f1": pytest.approx(f1[1]),
    }


def test_a_class_that_is_never_predicted_has_a_score_of_zero():
    metrics = classification_metrics(np.array([[3, 0, 0], [2, 0, 0], [0, 0, 5]]), ("a", "b", "c"))
    assert metrics["per_class"]["b"]["f1"] == 0.0
    assert metrics["macro_f1"] == pytest.approx((6 / 8 + 0 + 1) / 3)


@given(arrays(np.int64, (3, 3), elements=st.integers(0, 50)))
def test_matthews_is_the_correlation_of_one_hot_answers(confusion):
    rows = [(i, j) for i in range(3) for j in range(3) for _ in range(confusion[i, j])]
    if not rows:
        return
    truth, predicted = (np.eye(3)[[row[side] for row in rows]] for side in (0, 1))
    truth, predicted = truth - truth.mean(0), predicted - predicted.mean(0)
    norm = math.sqrt((truth**2).sum() * (predicted**2).sum())
    expected = (truth * predicted).sum() / norm if norm > 1e-9 else 0.0
    assert matthews(confusion) == pytest.approx(expected, abs=1e-9)


def test_chance_level_is_the_majority_accuracy_within_its_noise():
    assert majority([30, 70], ("no", "yes")) == {"label": "yes", "accuracy": 0.7}
    low, high = accuracy_interval(0.5, 100)
    assert (low, high) == (pytest.approx(0.4038, abs=1e-4), pytest.approx(0.5962, abs=1e-4))
    assert is_at_chance(0.55, 100, 0.5)
    assert not is_at_chance(0.65, 100, 0.5)
    assert is_at_chance(0.2, 1000, 0.5), "below chance is no better"
    assert not is_at_chance(0.52, 20_000, 0.5), "more examples show smaller differences"
