"""The standard error of a metric over items, against formulas and repeated sampling."""

import math
import random
from statistics import fmean, stdev

import numpy as np
import pytest

from oelm.evaluation.item_scores import as_numbers, jackknife_error, mean_error


def test_leaving_out_items_gives_the_error_of_a_mean():
    values = [0.0, 1.0, 1.0, 0.0, 1.0, 0.5]
    assert mean_error(values) == pytest.approx(stdev(values) / math.sqrt(6))
    assert jackknife_error(values, fmean) == pytest.approx(mean_error(values))
    assert mean_error([1.0]) is None
    assert jackknife_error([1.0], fmean) is None


def test_many_items_are_left_out_in_groups():
    rng = random.Random(0)
    values = [rng.gauss(0, 1) for _ in range(2000)]
    assert jackknife_error(values, fmean) == pytest.approx(mean_error(values), rel=0.1)


def test_the_error_of_a_perplexity_is_its_spread_over_other_items():
    """The texts have different lengths, and the perplexity is per word."""
    rng = random.Random(1)

    def texts():
        weights = [rng.randint(5, 50) for _ in range(80)]
        return [(-weight * rng.gauss(3.0, 0.3), weight) for weight in weights]

    def perplexity(items):
        return math.exp(-sum(value for value, _ in items) / sum(weight for _, weight in items))

    spread = stdev(perplexity(texts()) for _ in range(500))
    errors = [jackknife_error(texts(), perplexity) for _ in range(40)]
    assert fmean(errors) == pytest.approx(spread, rel=0.15)


def test_items_are_kept_as_numbers_where_they_are_some():
    assert as_numbers([True, 0, np.float32(0.1)]) == ([1.0, 0.0, 0.1], [])
    assert as_numbers([(-1.23456789, 3), (-2.0, 4)]) == ([-1.234568, -2.0], [3.0, 4.0])
    assert as_numbers([("a", "b"), ("c", "d")]) == ([], [])
