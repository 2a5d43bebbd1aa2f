"""The learning rates of fine-tuning: the study's, which differ between its arms, and one grid for all arms alike."""

from __future__ import annotations

from .method import Method

# The study trained its baseline with one rate and its frozen arms with another, so its arms differ in two things.
BASELINE_RATE, FROZEN_RATE = 2e-5, 1e-4
# What every arm is to be searched over before arms are compared. It holds both of the study's rates, and goes beyond.
RATE_GRID = (1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4)


def reference_rate(method: Method) -> float:
    """The rate that the study gave to a method: whether it freezes anything decides."""
    frozen = method.q.frozen or method.k.frozen or method.ffn.frozen or method.rest != "trained"
    return FROZEN_RATE if frozen else BASELINE_RATE
