"""The learning rates of the study's fine-tuning, which differ between its arms."""

from __future__ import annotations

from ..method.spec import Method

# The study trained its baseline with one rate and its frozen arms with another, so its arms differ in two things.
BASELINE_RATE, FROZEN_RATE = 2e-5, 1e-4


def reference_rate(method: Method) -> float:
    """The rate that the study gave to a method: whether it freezes anything decides."""
    frozen = method.q.frozen or method.k.frozen or method.ffn.frozen or method.rest != "trained"
    return FROZEN_RATE if frozen else BASELINE_RATE
