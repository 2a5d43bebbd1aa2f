"""Tests a method on a model: applies it, takes real optimiser steps, and compares every tensor before and after."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import OelmError
from .apply import apply
from .audit import audit
from .freeze_report import FreezeReport
from .seal import content_hash, record_of, verify
from .spec import Method

_BATCH, _LENGTH = 4, 12


@dataclass(frozen=True)
class Diagnosis:
    """The report before the optimiser steps, and which tensors they changed."""

    report: FreezeReport
    losses: tuple[float, ...]
    moved: tuple[str, ...]
    frozen_but_moved: tuple[str, ...]
    trainable_but_still: tuple[str, ...]
    verification: str

    @property
    def healthy(self) -> bool:
        """Return True when every trainable tensor changed and no frozen one did."""
        return not self.frozen_but_moved and not self.trainable_but_still

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "report"}
        return {"healthy": self.healthy, **fields, "report": self.report.to_dict()}


def diagnose(
    model: nn.Module,
    method: Method | str | dict[str, Any] | None = None,
    seed: int = 0,
    steps: int = 3,
    learning_rate: float = 1e-3,
    weight_decay: float = 0.1,
) -> Diagnosis:
    """Apply the method, train for a few steps of AdamW, and return which tensors changed.

    Without a method the model is tested as it is. The model is changed: it has the method, and it was trained.
    """
    report = audit(model) if method is None else apply(model, method, seed)
    parameters = dict(model.named_parameters())
    before = {name: content_hash(parameter) for name, parameter in parameters.items()}
    losses = train_steps(model, steps, seed, learning_rate, weight_decay)
    after = {name: content_hash(parameter) for name, parameter in parameters.items()}
    moved = tuple(name for name in parameters if before[name] != after[name])
    still = tuple(name for name, p in parameters.items() if p.requires_grad and before[name] == after[name])
    frozen_moved = tuple(name for name in moved if not parameters[name].requires_grad)
    verification = "no method is recorded in this model"
    if record_of(model) is not None:
        try:
            verification = str(verify(model))
        except OelmError as error:
            verification = str(error)
            frozen_moved = frozen_moved or ("see the verification",)
    return Diagnosis(report, losses, moved, frozen_moved, still, verification)


def train_steps(
    model: nn.Module, steps: int, seed: int = 0, learning_rate: float = 1e-3, weight_decay: float = 0.1
) -> tuple[float, ...]:
    """Train every trainable parameter with AdamW on a built-in batch, and return the loss of each step."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not trainable:
        raise OelmError("nothing in this model is trainable")
    optimiser = torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=weight_decay)
    batch = sample_batch(model, seed)
    training, losses = model.training, []
    model.train()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for _ in range(steps):
            optimiser.zero_grad()
            loss = _loss(model(**batch))
            torch.autograd.backward(loss)
            optimiser.step()
            losses.append(float(loss.detach()))
    model.train(training)
    return tuple(losses)


def sample_batch(model: nn.Module, seed: int = 0) -> dict[str, Tensor]:
    """Return a small random batch for a model of this class: padded text, images or sound, with labels for its loss."""
    config: Any = model.config
    arguments = inspect.signature(model.forward).parameters
    rng = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    batch: dict[str, Tensor] = {}
    if "pixel_values" in arguments:
        size = config.image_size
        batch["pixel_values"] = torch.randn(_BATCH, config.num_channels, size, size, generator=rng)
    elif "input_features" in arguments:  # a spectrogram, which a convolution halves
        frames = 2 * config.max_source_positions
        batch["input_features"] = torch.randn(_BATCH, config.num_mel_bins, frames, generator=rng)
    else:
        ids = _sample_ids(config, rng)
        end_of_text = getattr(config, "eos_token_id", None)
        if isinstance(end_of_text, int) and end_of_text < config.vocab_size:
            ids[:, -1] = end_of_text  # some classifiers read the state at that token
        batch["input_ids"] = ids
        if "attention_mask" in arguments:
            batch["attention_mask"] = torch.ones_like(ids)
            batch["attention_mask"][0, -_LENGTH // 3 :] = 0
    if getattr(config, "add_cross_attention", False):
        batch["encoder_hidden_states"] = torch.randn(_BATCH, 5, config.hidden_size, generator=rng)
    if "labels" in arguments:
        kind = type(model).__name__
        if any(task in kind for task in ("SequenceClassification", "ImageClassification", "AudioClassification")):
            batch["labels"] = torch.randint(0, config.num_labels, (_BATCH,), generator=rng)
        elif "TokenClassification" in kind:
            batch["labels"] = torch.randint(0, config.num_labels, (_BATCH, _LENGTH), generator=rng)
        else:
            batch["labels"] = batch["input_ids"].clone() if "input_ids" in batch else _sample_ids(config, rng)
    dtype = next(model.parameters()).dtype
    return {k: v.to(device, dtype) if v.is_floating_point() else v.to(device) for k, v in batch.items()}


def _sample_ids(config: Any, rng: torch.Generator) -> Tensor:
    return torch.randint(3, config.vocab_size, (_BATCH, _LENGTH), generator=rng)


def _loss(output: Any) -> Tensor:
    """Return the model's own loss or, for a model without one, the mean square of all its outputs."""
    if getattr(output, "loss", None) is not None:
        return output.loss  # type: ignore[no-any-return]
    tensors = [value for value in output.values() if isinstance(value, Tensor) and value.is_floating_point()]
    return sum((value.float().square().mean() for value in tensors), torch.zeros(()))
