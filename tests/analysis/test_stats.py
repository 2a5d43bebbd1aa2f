"""The statistics, compared with scipy, with values of statsmodels, and on simulated runs."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats as scipy_stats

from oelm.analysis.stats import Welch, above, below, bootstrap, estimate, holm, slope, slope_above, slope_below, tost
from oelm.errors import AnalysisError

# Student's own data (1908): hours of sleep gained by ten people with one drug and with another.
FIRST = np.array([0.7, -1.6, -0.2, -1.2, -0.1, 3.4, 3.7, 0.8, 0.0, 2.0])
SECOND = np.array([1.9, 0.8, 1.1, 0.1, -0.1, 4.4, 5.5, 1.6, 4.6, 3.4])
GAIN = SECOND - FIRST


def test_welchs_test_is_that_of_the_textbook_example():
    """R's help page of t.test has the p of no difference: 0.07939, with 17.776 degrees of freedom."""
    welch = Welch.of(FIRST, SECOND)
    assert (welch.degrees, 2 * welch.below(0)) == pytest.approx((17.776, 0.07939), rel=1e-3)
    assert welch.interval() == pytest.approx((-3.3654832, 0.2054832))
    for bound in (-2.0, 0.5):
        expected = scipy_stats.ttest_ind(FIRST - bound, SECOND, equal_var=False, alternative="less").pvalue
        assert welch.below(bound) == pytest.approx(expected)
    assert Welch.of(FIRST, [1.0, 1.0, 1.0]) is None
    assert Welch.of(FIRST, [1.0]) is None


def test_the_paired_interval_is_that_of_the_textbook_example():
    result = estimate(GAIN)
    expected = scipy_stats.ttest_rel(SECOND, FIRST)
    low, high = expected.confidence_interval(0.95)
    assert (result.mean, result.n) == (pytest.approx(1.58), 10)
    assert result.p == pytest.approx(expected.pvalue, rel=1e-9)
    assert result.p == pytest.approx(0.00283289, rel=1e-5)  # the value in textbooks
    assert (result.low, result.high) == (pytest.approx(low, rel=1e-9), pytest.approx(high, rel=1e-9))


def test_one_sided_tests_and_tost_are_those_of_scipy_and_statsmodels():
    assert above(GAIN, 0.5) == pytest.approx(scipy_stats.ttest_1samp(GAIN, 0.5, alternative="greater").pvalue, rel=1e-9)
    assert below(GAIN, 2.5) == pytest.approx(scipy_stats.ttest_1samp(GAIN, 2.5, alternative="less").pvalue, rel=1e-9)
    # statsmodels.stats.weightstats.ttost_paired(SECOND, FIRST, 0.5, 3.0) and (..., 1.0, 2.0)
    assert tost(GAIN, 0.5, 3.0) == pytest.approx(STATSMODELS_TOST[0], rel=1e-9)
    assert tost(GAIN, 1.0, 2.0) == pytest.approx(STATSMODELS_TOST[1], rel=1e-9)


def test_tost_at_5_percent_is_the_90_percent_interval_inside_the_margin():
    for low, high in ((0.5, 3.0), (0.9, 2.3), (0.8, 2.35), (1.5, 1.6), (-1.0, 2.2)):
        inside = estimate(GAIN, 0.90)
        assert (tost(GAIN, low, high) < 0.05) == (low < inside.low and inside.high < high)


def test_holms_correction_is_that_of_statsmodels():
    values = [0.01, 0.04, 0.03, 0.005, 0.2, 0.04]
    # statsmodels.stats.multitest.multipletests(values, method="holm")[1]
    assert holm(values) == pytest.approx(STATSMODELS_HOLM)
    assert holm([]) == []


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_corrected_values_are_never_smaller_and_keep_their_order(values):
    adjusted = holm(values)
    assert all(value <= new <= 1 for value, new in zip(values, adjusted, strict=True))
    order = sorted(range(len(values)), key=lambda index: values[index])
    assert [adjusted[index] for index in order] == sorted(adjusted)
    assert min(adjusted) == pytest.approx(min(1.0, len(values) * min(values)))


def test_the_bootstrap_interval_is_that_of_scipys_bca():
    skewed = np.random.default_rng(3).lognormal(size=12)
    interval = bootstrap(skewed, resamples=40_000)
    expected = scipy_stats.bootstrap(
        (skewed,), np.mean, n_resamples=40_000, method="BCa", rng=np.random.default_rng(1)
    ).confidence_interval
    assert interval == (pytest.approx(expected.low, rel=0.02), pytest.approx(expected.high, rel=0.02))
    assert bootstrap(skewed) == bootstrap(skewed)  # seeded, so that a report can be reproduced
    assert bootstrap([2.0] * 7) == (2.0, 2.0)


def test_the_bootstrap_needs_six_pairs():
    assert estimate(GAIN[:5]).boot_low is None
    assert estimate(GAIN[:6]).boot_low is not None


def test_the_slope_and_its_p_values_are_those_of_scipy():
    x, y = [1.0, 2.0, 4.0, 7.0], [0.1, 0.15, 0.2, 0.45]
    expected = scipy_stats.linregress(x, y)
    line = slope(x, y)
    assert (line.mean, line.p) == (pytest.approx(expected.slope), pytest.approx(expected.pvalue))
    assert line.high - line.mean == pytest.approx(expected.stderr * scipy_stats.t.ppf(0.975, 2))
    for bound in (-0.1, 0.0, 0.02, 0.2):
        one_sided = scipy_stats.t.sf((expected.slope - bound) / expected.stderr, 2)
        assert (slope_above(line, bound), slope_below(line, bound)) == pytest.approx((one_sided, 1 - one_sided))
    with pytest.raises(AnalysisError, match="three points"):
        slope([1.0, 2.0], [1.0, 2.0])


def test_one_value_has_no_interval_and_no_p():
    result = estimate([0.3])
    assert (result.mean, result.n, result.low, result.high, result.p) == (0.3, 1, None, None, None)


# Correct answers of 872. Two more for each seed is the same difference, but for rounding.
CORRECT = [798, 801, 805]


@pytest.mark.parametrize("values", [[0.0] * 3, [0.2] * 7, [(correct + 2) / 872 - correct / 872 for correct in CORRECT]])
def test_values_that_differ_only_by_rounding_have_no_interval(values):
    result = estimate(values)
    assert result.mean == pytest.approx(values[0])
    assert (result.low, result.high, result.p, result.spread, result.boot_low) == (None, None, None, 0.0, None)
    assert above(values, -1.0) == below(values, 1.0) == tost(values, -1.0, 1.0) == 1.0


def test_rounding_errors_are_relative_to_the_scale():
    values = [1.001 - 1.0, 1000.001 - 1000.0, 3000.001 - 3000.0]
    assert estimate(values).spread > 0
    assert estimate(values, scale=3000.001).p is None
    assert estimate([1e-9, 2e-9, 3e-9], scale=1.0).p < 0.1, "a small difference is not a rounding error"


def test_points_on_a_line_have_a_slope_and_no_interval():
    line = slope([1.0, 2.0, 3.0], [0.1, 0.2, 0.1 + 0.2])
    assert (line.mean, line.low, line.p) == (pytest.approx(0.1), None, None)


@pytest.mark.parametrize("values", [[], [1.0, math.nan], [math.inf, 1.0]])
def test_values_that_are_not_finite_are_refused(values):
    with pytest.raises(AnalysisError, match="finite"):
        estimate(values)


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(-3, 3), min_size=2, max_size=9), st.floats(-2, 2))
def test_shifting_the_sample_shifts_the_interval(values, shift):
    assume(np.std(values) > 1e-9)
    original, shifted = estimate(values), estimate([value + shift for value in values])
    assert shifted.low == pytest.approx(original.low + shift, abs=1e-9)
    assert shifted.high == pytest.approx(original.high + shift, abs=1e-9)


@pytest.mark.parametrize("n", [2, 3, 5])
def test_with_no_true_difference_95_percent_of_the_intervals_cover_zero(n):
    """4,000 simulated comparisons of n paired seeds; the coverage has a standard error of 0.0034."""
    samples = np.random.default_rng(n).normal(0, 0.02, (4000, n))
    covered = sum(result.low <= 0 <= result.high for result in map(estimate, samples))
    assert covered / len(samples) == pytest.approx(0.95, abs=0.012)


def test_a_true_difference_at_the_margin_is_called_alike_in_5_percent_of_samples():
    samples = np.random.default_rng(7).normal(math.log(1.05), 0.01, (3000, 4))
    called_alike = sum(tost(sample, math.log(0.95), math.log(1.05)) < 0.05 for sample in samples)
    assert called_alike / len(samples) == pytest.approx(0.05, abs=0.014)


# Computed once with statsmodels 0.15.0.
STATSMODELS_TOST = (0.010759243378387268, 0.1541572356690974)
STATSMODELS_HOLM = [0.05, 0.12, 0.12, 0.03, 0.2, 0.12]
