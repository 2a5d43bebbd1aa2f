"""Compare the times of arms that take turns, round by round.

Machines are shared and clock rates change, so the arms of a benchmark are interleaved in rounds. A ratio within a round
compares times taken shortly after each other, which a ratio of overall medians does not.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable

import numpy as np
from scipy.special import stdtrit

# The seconds of each step or token, one list per round.
Rounds = list[list[float]]
# Called between timed parts with the name of the next stage, how many of its items are done, and how many there are.
ShowProgress = Callable[[str, int, int], None]


def no_progress(stage: str, done: int, total: int) -> None:
    """Show nothing."""


def median_seconds(rounds: Rounds) -> float:
    """Return the median time of a step or token over all rounds."""
    return statistics.median(second for seconds in rounds for second in seconds)


def round_medians(rounds: Rounds) -> list[float]:
    """Return the median of every round in milliseconds."""
    return [1000 * statistics.median(seconds) for seconds in rounds]


def ratio_of_rounds(rounds: Rounds, reference: Rounds) -> tuple[float, float | None]:
    """Return the ratio of an arm's median time to the reference's, averaged over rounds, and half its 95 % interval.

    A single round has no interval.
    """
    pairs = zip(rounds, reference, strict=True)
    ratios = np.array(
        [statistics.median(times) / statistics.median(reference_times) for times, reference_times in pairs]
    )
    count = len(ratios)
    if count == 1:
        return float(ratios[0]), None
    half_interval = stdtrit(count - 1, 0.975) * ratios.std(ddof=1) / count**0.5
    return float(ratios.mean()), float(half_interval)
