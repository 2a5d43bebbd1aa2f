"""Check a run without its data: build the model without memory, plan the method on it, count its parameters."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from ..config import GPT, RANDOM, ModelConfig
from ..data.corpus.header import HEADER
from ..data.corpus.tokens import TokenDataset
from ..data.synthetic.sequences import VOCABULARY as GENERATED_VOCABULARY
from ..errors import LabError, OelmError
from .plan import PlannedRun
from .preflight import Requirement, known_requirements

# Assumed where the data is not read: about the vocabulary of the built-in data, and two classes.
_BUILTIN_VOCABULARY, _LABELS = 600, 2


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """What a run would train.

    parameters, trainable   counts with the method applied
    matrices, adapters      how many matrices are set or frozen, and how many get an adapter
    changes_at              the steps at which the method's schedule freezes or unfreezes something
    flops_per_token         FLOPs of a training step per token
    stand_in                the type of the model that was counted, if the run's own is pretrained and was not read
    """

    parameters: int
    trainable: int
    matrices: int
    adapters: int
    changes_at: tuple[int, ...]
    flops_per_token: float
    stand_in: str | None = None


def dry_run(run: PlannedRun) -> DryRun:
    """Check a run as far as possible without data; raise a `LabError` that names the run and what does not fit."""
    from ..method.events import events
    from ..method.plan import plan

    config = run.config
    try:
        model = _skeleton(run)
        last_step = config.train.max_steps
        # How many steps some epochs are is known with the data alone, and then shares of them are not known either.
        method = config.method if last_step is None else config.method.resolve(last_step)
        operation = plan(model, method)
        batch = (config.data.sequence_length, config.train.micro_batch_size or config.train.batch_size)
        parameters, trainable, flops = _count(model, method.to_json(), batch, _head_share(run))
        is_known = method.schedule.steps or not method.schedule.shares
        changes_at = tuple(event.step for event in events(model, method)) if is_known else ()
        if changes_at and last_step is not None and changes_at[-1] >= last_step:
            raise LabError(f"method.schedule acts at step {changes_at[-1]}, past train.max_steps {last_step}")
    except OelmError as error:
        raise LabError(f"{run.name}: {error}") from None
    built_here = (run.starts_from or run).config.model.name.startswith((GPT, RANDOM))
    return DryRun(
        parameters=parameters,
        trainable=trainable,
        matrices=len(operation.targets),
        adapters=len(operation.adapted),
        changes_at=changes_at,
        flops_per_token=flops,
        stand_in=None if built_here else run.experiment.stand_in,
    )


@cache
def _count(model: Any, method: str, batch: tuple[int, int], head_share: float) -> tuple[int, int, float]:
    """Return the parameters, the trainable ones, and the FLOPs per token of a skeleton with a method.

    Cached, so that it is computed once for all seeds. No data passes through the skeleton, so every layer is assumed to
    pass gradients on: the FLOPs are too many where the first layers are frozen.
    """
    from ..method.apply import outline
    from ..method.spec import Method
    from ..models.flops import train_flops_per_token

    changed_model = outline(model, Method.model_validate_json(method))
    sizes = [(parameter.numel(), parameter.requires_grad) for parameter in changed_model.parameters()]
    trainable = sum(size for size, is_trainable in sizes if is_trainable)
    flops = train_flops_per_token(changed_model, *batch, head_share=head_share)
    return sum(size for size, _ in sizes), trainable, flops


def _head_share(run: PlannedRun) -> float:
    """Return the share of a run's tokens that a language model's head reads."""
    config = run.config
    if config.task.kind != "masked-language":
        return 1.0
    from ..training.tasks.masked import masked_count

    return masked_count(config.task, config.data.sequence_length) / config.data.sequence_length


def _skeleton(run: PlannedRun) -> Any:
    """Return the model of a run, or of the run that it starts from, without its weights."""
    model = (run.starts_from or run).config.model
    fields = json.dumps(model.fields, sort_keys=True)
    sizes = (_vocabulary(run), run.config.data.sequence_length)
    return _build(model.name, fields, sizes, run.config.task.kind, run.experiment.stand_in)


def _vocabulary(run: PlannedRun) -> int:
    """Return the vocabulary of the run's tokens if they are here, else of the data that its experiment names."""
    path = run.config.data.path
    if run.config.task.kind == "generated":
        return GENERATED_VOCABULARY
    if "builtin:" in f"{path} {run.config.task.name}":
        return _BUILTIN_VOCABULARY
    on_text = run.config.task.kind in ("language", "masked-language")
    if on_text and path is not None and (Path(path) / HEADER).is_file():
        return TokenDataset.open(path).vocab_size
    requirement = known_requirements().get(run.experiment.data or "")
    return requirement.vocabulary if requirement is not None else Requirement.vocabulary


@cache
def _build(name: str, fields: str, sizes: tuple[int, int], kind: str, stand_in: str | None) -> Any:
    """Build a model on the meta device, where it takes no memory and no time; a small random one is built as it is."""
    import torch
    from transformers import (
        AutoConfig,
        AutoModelForCausalLM,
        AutoModelForMaskedLM,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
    )

    from ..models.gpt_config import gpt_config
    from ..models.run_model import masked_model_config
    from ..models.small import require_fields, small_config, small_model

    if name.startswith(RANDOM) and kind == "masked-language":
        vocabulary, length = sizes
        # One more entry for the mask; where texts are padded, its first tokens are the special ones.
        model_config = masked_model_config(ModelConfig(name=name, fields=json.loads(fields)), vocabulary + 1, length, 0)
        with torch.device("meta"):
            return AutoModelForMaskedLM.from_config(model_config)
    if name.startswith(RANDOM):
        family = name.removeprefix(RANDOM)
        require_fields(small_config(family), json.loads(fields))
        return small_model(family, **json.loads(fields))
    if name.startswith(GPT):
        all_fields = {"vocab_size": sizes[0], "max_position_embeddings": sizes[1], **json.loads(fields)}
        model_config = gpt_config(name.removeprefix(GPT), **all_fields)
    elif stand_in is not None:
        model_config = AutoConfig.for_model(stand_in)
    else:
        raise LabError(f"model.name {name}: a dry run cannot see a pretrained model; the experiment names no stand_in")
    model_config.num_labels = _LABELS
    classes = {
        "classification": AutoModelForSequenceClassification,
        "masked-language": AutoModelForMaskedLM,
        "text2text": AutoModelForSeq2SeqLM,
    }
    with torch.device("meta"):
        return classes.get(kind, AutoModelForCausalLM).from_config(model_config)
