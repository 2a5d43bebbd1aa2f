"""How long a run is and when it validates and saves, in steps: computed once its data gives an epoch's length."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from ..config import RunConfig
from ..method.spec import Method


@dataclass(frozen=True)
class RunLength:
    """A run in optimiser steps: their number, how many warm up, and how often it validates and saves."""

    steps: int
    warmup: int
    validate_every: int
    save_every: int
    steps_per_epoch: float

    @classmethod
    def of(cls, config: RunConfig, samples_per_epoch: int) -> RunLength:
        """Compute the steps of a config for data with this many samples per epoch."""
        per_epoch = samples_per_epoch / config.train.batch_size
        steps = config.train.max_steps
        if steps is None:
            assert config.train.epochs is not None, "a config has one of the two"
            # In exact fractions: in floating point 1.1 epochs of 50 steps are slightly above 55, and would round to 56.
            epochs = Fraction(str(config.train.epochs))
            steps = max(1, math.ceil(epochs * samples_per_epoch / config.train.batch_size))
        warmup = config.optimizer.warmup_steps
        return cls(
            steps=steps,
            warmup=round(steps * config.optimizer.warmup_share) if warmup is None else warmup,
            validate_every=_in_steps(config.eval.every, per_epoch),
            save_every=_in_steps(config.checkpoint.every, per_epoch),
            steps_per_epoch=per_epoch,
        )

    def epoch(self, step: int) -> float:
        """Return the number of epochs done after `step` steps."""
        return round(step / self.steps_per_epoch, 4)

    def warnings(self) -> list[str]:
        """Return a warning when the run ends before its warm-up does."""
        if self.warmup <= self.steps:
            return []
        return [
            f"the warm-up of {self.warmup:,} steps is longer than the run of {self.steps:,}: the learning rate ends at "
            f"{self.steps / self.warmup:.3g} of the configured one"
        ]


def resolved_method(config: RunConfig, samples_per_epoch: int) -> Method:
    """Return the config's method, with the steps that its schedule's shares are for data with this many samples."""
    return config.method.resolve(RunLength.of(config, samples_per_epoch).steps)


def _in_steps(every: int | Literal["epoch"], steps_per_epoch: float) -> int:
    return max(1, math.ceil(steps_per_epoch)) if every == "epoch" else every
