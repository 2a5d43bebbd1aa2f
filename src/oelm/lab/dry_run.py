"""A run tried without its data: the model built without memory, the method checked against it, its steps counted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..config import GPT, RANDOM, ModelConfig
from ..data.corpus.header import HEADER
from ..data.corpus.tokens import TokenDataset
from ..errors import LabError, OelmError
from .plan import Planned
from .preflight import Need, needs

# What a model is given where its data would say it: about the vocabulary of built-in data, and two classes.
_BUILT_IN, _LABELS = 600, 2


@dataclass(frozen=True)
class DryRun:
    """What a run would be: its parameters once the method is applied, what it sets, and when its schedule acts.

    `matrices` are set or frozen; `adapters` stand beside others. `stand_in` is the type of the model that was counted,
    where the run's own is pretrained and not read here.
    """

    parameters: int
    trainable: int
    matrices: int
    adapters: int
    changes_at: tuple[int, ...]
    flops_per_token: float
    stand_in: str | None = None


def dry_run(run: Planned) -> DryRun:
    """Check a run as far as that goes without data. Raises a `LabError` that names the run and what does not fit."""
    from ..method.plan import plan
    from ..method.schedule import events

    config = run.config
    try:
        model = _skeleton(run)
        operation = plan(model, config.method)
        batch = (config.data.sequence_length, config.train.micro_batch_size or config.train.batch_size)
        parameters, trainable, flops = _count(model, config.method.to_json(), batch)
        steps = tuple(event.step for event in events(model, config.method))
        if steps and config.train.max_steps is not None and steps[-1] >= config.train.max_steps:
            raise LabError(f"method.schedule acts at step {steps[-1]}, past train.max_steps {config.train.max_steps}")
    except OelmError as error:
        raise LabError(f"{run.name}: {error}") from None
    known = _model_of(run).name.startswith((GPT, RANDOM))
    stand_in = None if known else run.experiment.stand_in
    return DryRun(parameters, trainable, len(operation.targets), len(operation.adapted), steps, flops, stand_in)


@cache
def _count(model: Any, method: str, batch: tuple[int, int]) -> tuple[int, int, float]:
    """Parameters, those that train, and FLOPs per token of a skeleton with a method; once for all seeds of an arm.

    Nothing passes through it, so gradients are taken to come everywhere: too many where the first layers are frozen.
    """
    from ..method.apply import outline
    from ..method.spec import Method
    from ..models.flops import train_flops_per_token

    made = outline(model, Method.model_validate_json(method))
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in made.parameters()]
    trainable = sum(size for size, trains in sizes if trains)
    return sum(size for size, _ in sizes), trainable, train_flops_per_token(made, *batch)


def _model_of(run: Planned) -> ModelConfig:
    """A run's model; where it starts from another run, that one's."""
    return run.config.model if run.after is None else run.after.config.model


def _skeleton(run: Planned) -> Any:
    """The model of a run, without its weights."""
    model = _model_of(run)
    fields = json.dumps(model.fields, sort_keys=True)
    classify = run.config.task.kind == "classification"
    room = (_vocabulary(run), run.config.data.sequence_length)
    return _build(model.name, fields, room, classify, run.experiment.stand_in)


def _vocabulary(run: Planned) -> int:
    """That of the run's tokens where they are there, else of the data that its experiment is about."""
    path = run.config.data.path
    if "builtin:" in f"{path} {run.config.task.name}":
        return _BUILT_IN
    if run.config.task.kind == "language" and path is not None and (Path(path) / HEADER).is_file():
        return TokenDataset.open(path).vocab_size
    need = needs().get(run.experiment.data or "")
    return need.vocabulary if need is not None else Need.vocabulary


@cache
def _build(name: str, fields: str, room: tuple[int, int], classify: bool, stand_in: str | None) -> Any:
    """A model on the meta device, where it takes no memory and no time, whatever its size; a small one as it is."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

    from ..models.gpt import gpt_config
    from ..models.small import require_fields, small_config, small_model

    if name.startswith(RANDOM):
        family = name.removeprefix(RANDOM)
        require_fields(small_config(family), json.loads(fields))
        return small_model(family, **json.loads(fields))
    if name.startswith(GPT):
        sizes = {"vocab_size": room[0], "max_position_embeddings": room[1], **json.loads(fields)}
        own: Any = gpt_config(name.removeprefix(GPT), **sizes)
    elif stand_in is not None:
        own = AutoConfig.for_model(stand_in)
    else:
        raise LabError(f"model.name {name}: a dry run cannot see a pretrained model; the experiment names no stand_in")
    own.num_labels = _LABELS
    with torch.device("meta"):
        return (AutoModelForSequenceClassification if classify else AutoModelForCausalLM).from_config(own)
