"""The statistics: paired t, bootstrap, equivalence (TOST), a slope, Holm's correction. Pure functions over numbers.

Everything is about differences between pairs, so one sample of numbers comes in. Ratios are differences of logarithms.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import AnalysisError

CONFIDENCE = 0.95
ALPHA = 1 - CONFIDENCE
# With fewer pairs there are too few different resamples for a bootstrap to say more than the t interval does.
BOOTSTRAP_PAIRS = 6
BOOTSTRAP_RESAMPLES = 9999
# A spread below this share of the numbers themselves is that of their rounding: (801 + 2) / 872 - 801 / 872 and
# (805 + 2) / 872 - 805 / 872 differ in the seventeenth digit.
_ROUNDING = 1e-12
# A relative interval wider than this, a thousand points of a hundred, has bounds that mean nothing.
_TOO_WIDE = 10.0


@dataclass(frozen=True)
class Estimate:
    """A mean with its interval. With one value, or values without spread, there is none, and nothing is claimed."""

    mean: float
    n: int
    low: float | None = None
    high: float | None = None
    p: float | None = None
    spread: float | None = None
    boot_low: float | None = None
    boot_high: float | None = None

    def exp(self) -> Estimate:
        """From differences of logarithms to a ratio."""
        return self.mapped(_exp)

    def mapped(self, to: Callable[[float], float]) -> Estimate:
        """The mean and the bounds on another scale; `p` and `spread` stay those of this one."""
        low, high, boot_low, boot_high = (
            None if bound is None else to(bound) for bound in (self.low, self.high, self.boot_low, self.boot_high)
        )
        return Estimate(to(self.mean), self.n, low, high, self.p, self.spread, boot_low, boot_high)


def estimate(values: Sequence[float], confidence: float = CONFIDENCE, scale: float | None = None) -> Estimate:
    """The mean of values with its t interval and the two-sided p of a mean of zero; a bootstrap where n allows.

    `scale` is the size of the numbers that the values are differences of, by default their own: it says what rounding
    may do to them.
    """
    sample = _finite(values)
    n, mean = len(sample), float(sample.mean())
    if n < 2:
        return Estimate(mean, n)
    spread = _spread(sample, scale)
    if spread == 0:
        return Estimate(mean, n, spread=spread)
    error = spread / math.sqrt(n)
    half = t_quantile(1 - (1 - confidence) / 2, n - 1) * error
    low_high = bootstrap(sample, confidence) if n >= BOOTSTRAP_PAIRS else (None, None)
    return Estimate(mean, n, mean - half, mean + half, two_sided(mean, error, n - 1), spread, *low_high)


def too_noisy(found: Estimate | None) -> bool:
    """Whether a relative change's interval is too wide to say anything."""
    return found is not None and found.low is not None and found.high is not None and found.high - found.low > _TOO_WIDE


def two_sided(mean: float, error: float, degrees: int) -> float:
    """The p of a mean of zero."""
    return 2 * t_cdf(-abs(mean) / error, degrees)


def above(values: Sequence[float], bound: float) -> float:
    """One-sided p for "the mean is above `bound`": small when it is; values without spread show nothing."""
    sample = _finite(values)
    error = _spread(sample) / math.sqrt(len(sample))
    distance = float(sample.mean()) - bound
    return t_cdf(-distance / error, len(sample) - 1) if error > 0 else 1.0


def below(values: Sequence[float], bound: float) -> float:
    """One-sided p for "the mean is below `bound`"."""
    return above([-value for value in values], -bound)


def tost(values: Sequence[float], low: float, high: float) -> float:
    """Two one-sided tests: the p for "the mean lies between `low` and `high`", the larger of the two."""
    if not low < high:
        raise AnalysisError(f"an equivalence margin runs from low to high, not from {low} to {high}")
    return max(above(values, low), below(values, high))


def bootstrap(
    values: Sequence[float] | npt.NDArray[np.float64],
    confidence: float = CONFIDENCE,
    resamples: int = BOOTSTRAP_RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """The BCa bootstrap interval of a mean: percentiles corrected for bias and skewness. Seeded, so it repeats."""
    sample = _finite(values)
    n, mean = len(sample), float(sample.mean())
    if np.ptp(sample) == 0:
        return mean, mean
    draws = np.random.default_rng(seed).integers(0, n, (resamples, n))
    means = np.sort(sample[draws].mean(axis=1))
    special = _special()
    share = (np.sum(means < mean) + np.sum(means <= mean)) / (2 * resamples)
    bias = float(special.ndtri(share))
    left_out = (n * mean - sample) / (n - 1)
    away = left_out.mean() - left_out
    acceleration = float((away**3).sum() / (6 * (away**2).sum() ** 1.5))
    bounds = []
    for tail in ((1 - confidence) / 2, 1 - (1 - confidence) / 2):
        z = bias + float(special.ndtri(tail))
        level = float(special.ndtr(bias + z / (1 - acceleration * z)))
        bounds.append(float(np.quantile(means, level)))
    return bounds[0], bounds[1]


def slope(
    x: Sequence[float], y: Sequence[float], confidence: float = CONFIDENCE, scale: float | None = None
) -> Estimate:
    """The slope of a straight line through points, with its interval and the p of a slope of zero; n is the points.

    `scale` is the size of the numbers that y are differences of, as in `estimate`: points on a line have no interval.
    """
    across, up = _finite(x), _finite(y)
    n = len(across)
    centred = across - across.mean()
    total = float((centred**2).sum())
    if n < 3 or total == 0:
        raise AnalysisError("a trend needs three points or more, at different places")
    found = float((centred * up).sum()) / total
    rest = up - up.mean() - found * centred
    scatter = math.sqrt(float((rest**2).sum()) / (n - 2))
    if _is_rounding(scatter, up, scale):
        return Estimate(found, n, spread=0.0)
    error = scatter / math.sqrt(total)
    half = t_quantile(1 - (1 - confidence) / 2, n - 2) * error
    return Estimate(found, n, found - half, found + half, two_sided(found, error, n - 2), error)


def slope_above(line: Estimate, bound: float) -> float:
    """One-sided p for "the slope is above `bound`", of what `slope` found: its `spread` is the slope's own error."""
    if not line.spread:
        return 1.0
    return t_cdf((bound - line.mean) / line.spread, line.n - 2)


def slope_below(line: Estimate, bound: float) -> float:
    return slope_above(line.mapped(lambda value: -value), -bound)


def holm(values: Sequence[float]) -> list[float]:
    """Holm's adjusted p-values, in the order given: a family of tests then errs once in twenty, not each of them."""
    order = sorted(range(len(values)), key=lambda index: values[index])
    adjusted, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(order):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        adjusted[index] = largest
    return adjusted


def t_cdf(value: float, degrees: int) -> float:
    return float(_special().stdtr(degrees, value))


def t_quantile(share: float, degrees: int) -> float:
    return float(_special().stdtrit(degrees, share))


def _spread(sample: npt.NDArray[np.float64], scale: float | None = None) -> float:
    """The standard deviation; none at all where it is only that of rounding."""
    spread = float(sample.std(ddof=1))
    return 0.0 if _is_rounding(spread, sample, scale) else spread


def _is_rounding(spread: float, sample: npt.NDArray[np.float64], scale: float | None) -> bool:
    return spread <= _ROUNDING * (float(np.abs(sample).max()) if scale is None else scale)


def _exp(value: float) -> float:
    """e to a number; infinite where that overflows: a run that nearly diverged may have any perplexity."""
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf


def _special() -> Any:
    """scipy.special: its t and normal distributions, without the second that importing scipy.stats takes."""
    try:
        return import_module("scipy.special")
    except ImportError:
        raise AnalysisError("the statistics need scipy: pip install 'oelm[report]'") from None


def _finite(values: Sequence[float] | npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    sample = np.asarray(values, dtype=np.float64)
    if sample.size == 0 or not np.isfinite(sample).all():
        raise AnalysisError(f"statistics need finite numbers, not {list(values)}")
    return sample
