"""Statistics of differences: t intervals, Welch's, bootstraps, equivalence (TOST), a slope, and Holm's correction.

All functions take plain numbers. A ratio is analysed as a difference of logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
from scipy import special

from ..errors import AnalysisError

CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE
# With fewer pairs there are too few different resamples for a bootstrap to add anything to the t interval.
BOOTSTRAP_PAIRS = 6
BOOTSTRAP_RESAMPLES = 9999
CLUSTER_RESAMPLES = 1999
# A spread below this share of the numbers themselves comes from rounding: (801 + 2) / 872 - 801 / 872 and
# (805 + 2) / 872 - 805 / 872 differ in the seventeenth digit.
_ROUNDING = 1e-12
# A relative interval wider than this, a thousand percentage points, has bounds that mean nothing.
_TOO_WIDE = 10.0

_Numbers = Sequence[float] | npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A mean of n values, its interval and the p of a mean of zero. One value, or values without spread, have none."""

    mean: float
    n: int
    low: float | None = None
    high: float | None = None
    p: float | None = None
    spread: float | None = None
    boot_low: float | None = None
    boot_high: float | None = None

    def exp(self) -> Estimate:
        """Return the ratio that a mean difference of logarithms stands for."""
        return self.mapped(_exp)

    def mapped(self, to: Callable[[float], float]) -> Estimate:
        """Return the mean and the bounds on another scale; `p` and `spread` stay those of this scale."""
        low, high, boot_low, boot_high = (
            None if bound is None else to(bound) for bound in (self.low, self.high, self.boot_low, self.boot_high)
        )
        return replace(self, mean=to(self.mean), low=low, high=high, boot_low=boot_low, boot_high=boot_high)


def estimate(values: _Numbers, confidence: float = CONFIDENCE, scale: float | None = None) -> Estimate:
    """Return the mean with its t interval and the two-sided p of a mean of zero; with a bootstrap where n allows.

    `scale` is the size of the numbers that the values are differences of, by default that of the values: rounding
    errors are relative to it.
    """
    sample = _finite(values)
    n, mean = len(sample), float(sample.mean())
    if n < 2:
        return Estimate(mean=mean, n=n)
    spread = _spread(sample, scale)
    if spread == 0:
        return Estimate(mean=mean, n=n, spread=spread)
    error = spread / math.sqrt(n)
    half = t_quantile(1 - (1 - confidence) / 2, n - 1) * error
    boot_low, boot_high = bootstrap(sample, confidence) if n >= BOOTSTRAP_PAIRS else (None, None)
    p = _two_sided(mean, error, n - 1)
    interval = Estimate(mean=mean, n=n, low=mean - half, high=mean + half, p=p, spread=spread)
    return replace(interval, boot_low=boot_low, boot_high=boot_high)


@dataclass(frozen=True, kw_only=True)
class Welch:
    """The difference of two means as Welch's test takes it: its standard error and degrees of freedom."""

    mean: float
    error: float
    degrees: float

    @classmethod
    def of(cls, one: _Numbers, other: _Numbers) -> Welch | None:
        """Return the difference of the means of two samples; None where one has no spread."""
        samples = [_finite(one), _finite(other)]
        if min(map(len, samples)) < 2 or not all(_spread(sample) for sample in samples):
            return None
        squares = [_spread(sample) ** 2 / len(sample) for sample in samples]
        scatter = sum(square**2 / (len(sample) - 1) for square, sample in zip(squares, samples, strict=True))
        mean = float(samples[0].mean() - samples[1].mean())
        return cls(mean=mean, error=math.sqrt(sum(squares)), degrees=sum(squares) ** 2 / scatter)

    def interval(self, confidence: float = CONFIDENCE) -> tuple[float, float]:
        """Return the two-sided interval of the difference."""
        half = t_quantile(1 - (1 - confidence) / 2, self.degrees) * self.error
        return self.mean - half, self.mean + half

    def below(self, bound: float) -> float:
        """Return the one-sided p of "the difference is below `bound`"."""
        return t_cdf((self.mean - bound) / self.error, self.degrees)


def too_noisy(change: Estimate | None) -> bool:
    """Return True if the interval of a relative change is too wide to say anything."""
    if change is None or change.low is None or change.high is None:
        return False
    return change.high - change.low > _TOO_WIDE


def above(values: _Numbers, bound: float) -> float:
    """Return the one-sided p of "the mean is above `bound`": small when it is. Values without spread give 1."""
    sample = _finite(values)
    error = _spread(sample) / math.sqrt(len(sample))
    distance = float(sample.mean()) - bound
    return t_cdf(-distance / error, len(sample) - 1) if error > 0 else 1.0


def below(values: _Numbers, bound: float) -> float:
    """Return the one-sided p of "the mean is below `bound`"."""
    return above([-value for value in values], -bound)


def tost(values: _Numbers, low: float, high: float) -> float:
    """Return the p of "the mean lies between `low` and `high`": the larger one of two one-sided tests."""
    if not low < high:
        raise AnalysisError(f"an equivalence margin goes from low to high, not from {low} to {high}")
    return max(above(values, low), below(values, high))


def bootstrap(
    values: _Numbers, confidence: float = CONFIDENCE, resamples: int = BOOTSTRAP_RESAMPLES, seed: int = 0
) -> tuple[float, float]:
    """Return the BCa bootstrap interval of a mean, corrected for bias and skewness; the same for the same seed."""
    from scipy import stats  # takes most of a second to import, and most comparisons have too few pairs

    sample = _finite(values)
    if np.ptp(sample) == 0:
        return float(sample.mean()), float(sample.mean())
    options = {"confidence_level": confidence, "n_resamples": resamples, "method": "BCa"}
    interval = stats.bootstrap((sample,), np.mean, rng=np.random.default_rng(seed), **options).confidence_interval
    return float(interval.low), float(interval.high)


def cluster_bootstrap(
    sums: _Numbers, sizes: Sequence[int], confidence: float = CONFIDENCE, seed: int = 0
) -> tuple[float, float]:
    """Return the percentile interval of all sums over all sizes, with whole clusters drawn; the same for the same seed.

    A cluster is given by the sum over its members and their number.
    """
    totals, counts = _finite(sums), np.asarray(sizes)
    rng, ratios = np.random.default_rng(seed), np.empty(CLUSTER_RESAMPLES)
    for number in range(CLUSTER_RESAMPLES):
        drawn = rng.integers(len(totals), size=len(totals))
        ratios[number] = totals[drawn].sum() / counts[drawn].sum()
    low, high = np.quantile(ratios, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def slope(x: _Numbers, y: _Numbers, confidence: float = CONFIDENCE, scale: float | None = None) -> Estimate:
    """Return the slope of a straight line through n points, its interval and the p of a slope of zero.

    `spread` is the standard error of the slope. `scale` is the size of the numbers that y are differences of, as in
    `estimate`; points that lie on a line but for rounding have no interval.
    """
    from scipy import stats

    xs, ys = _finite(x), _finite(y)
    n = len(xs)
    if n < 3 or np.ptp(xs) == 0:
        raise AnalysisError(f"a trend needs three points or more, not all at the same x; got x {list(x)}")
    line = stats.linregress(xs, ys)
    scatter = float(line.stderr) * math.sqrt(float(((xs - xs.mean()) ** 2).sum()))
    if _is_rounding(scatter, ys, scale):
        return Estimate(mean=float(line.slope), n=n, spread=0.0)
    mean, error = float(line.slope), float(line.stderr)
    half = t_quantile(1 - (1 - confidence) / 2, n - 2) * error
    return Estimate(mean=mean, n=n, low=mean - half, high=mean + half, p=_two_sided(mean, error, n - 2), spread=error)


def slope_above(line: Estimate, bound: float) -> float:
    """Return the one-sided p of "the slope is above `bound`", for a line of `slope`."""
    if not line.spread:
        return 1.0
    return t_cdf((bound - line.mean) / line.spread, line.n - 2)


def slope_below(line: Estimate, bound: float) -> float:
    """Return the one-sided p of "the slope is below `bound`", for a line of `slope`."""
    return slope_above(line.mapped(lambda value: -value), -bound)


def holm(values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values in the order given, which bound the error of the whole family of tests."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = largest
    return adjusted


def t_cdf(value: float, degrees: float) -> float:
    """Return the probability that Student's t with these degrees of freedom is below a value."""
    return float(special.stdtr(degrees, value))


def t_quantile(share: float, degrees: float) -> float:
    """Return the value that Student's t with these degrees of freedom is below with probability `share`."""
    return float(special.stdtrit(degrees, share))


def _two_sided(mean: float, error: float, degrees: int) -> float:
    """Return the p of a mean of zero."""
    return 2 * t_cdf(-abs(mean) / error, degrees)


def _spread(sample: npt.NDArray[np.float64], scale: float | None = None) -> float:
    """Return the standard deviation, or 0 where it is no larger than rounding errors."""
    spread = float(sample.std(ddof=1))
    return 0.0 if _is_rounding(spread, sample, scale) else spread


def _is_rounding(spread: float, sample: npt.NDArray[np.float64], scale: float | None) -> bool:
    return spread <= _ROUNDING * (float(np.abs(sample).max()) if scale is None else scale)


def _exp(value: float) -> float:
    """Return e to a number, and infinity where that overflows: a run that nearly diverged may have any perplexity."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _finite(values: _Numbers) -> npt.NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64)
    if sample.size == 0 or not np.isfinite(sample).all():
        raise AnalysisError(f"statistics need finite numbers, not {list(values)}")
    return sample
