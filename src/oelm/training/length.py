"""How long a run is and what happens when, in steps: worked out once its data says how long an epoch is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from ..config import RunConfig


@dataclass(frozen=True)
class Pace:
    """A run in steps: how many there are, how many of them warm up, and after how many it validates and saves."""

    steps: int
    warmup: int
    validate_every: int
    save_every: int
    steps_per_epoch: float

    @classmethod
    def of(cls, config: RunConfig, samples_per_epoch: int) -> Pace:
        per_epoch = samples_per_epoch / config.train.batch_size
        steps = config.train.max_steps
        if steps is None:
            assert config.train.epochs is not None, "a config has one of the two"
            # Exactly: in floating point 1.1 epochs of 50 steps are a little more than 55, and would be 56 steps.
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
        """How many epochs are done after `step` steps."""
        return round(step / self.steps_per_epoch, 4)

    def warnings(self) -> list[str]:
        """What a reader of the result would not expect of its steps."""
        if self.warmup <= self.steps:
            return []
        return [
            f"the warm-up of {self.warmup:,} steps is longer than the run of {self.steps:,}: the learning rate ends at "
            f"{self.steps / self.warmup:.3g} of what was set"
        ]


def _in_steps(every: int | Literal["epoch"], steps_per_epoch: float) -> int:
    return max(1, math.ceil(steps_per_epoch)) if every == "epoch" else every
