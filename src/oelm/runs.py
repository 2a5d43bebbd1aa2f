"""What can be done with a run's folder after training: load its model, validate it again, let it write."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from .checkpoint import load
from .config import RunConfig
from .errors import CheckpointError, ConfigError
from .evaluate import validation_loss
from .files import read_json
from .method import Method
from .models.build import build_model
from .models.language import build_for_run
from .training.parallel import World
from .training.state import list_checkpoints, load_model, restore_record
from .training.task import LanguageModelling, SummedLoss


def is_run(path: Path) -> bool:
    """Whether a folder is a run's: it has a config of ours, not a model's."""
    config = path / "config.json"
    return config.is_file() and "experiment" in read_json(config)


def config_of(run: Path) -> RunConfig:
    """The config that a run's folder records."""
    if not is_run(run):
        raise ConfigError(f"{run}: not a run's folder; it has no config.json that `oelm train` wrote")
    recorded = read_json(run / "config.json")
    return RunConfig.load({key: value for key, value in recorded.items() if key not in ("format", "id")})


def load_run(run: Path, last: bool = False) -> PreTrainedModel:
    """A run's best model, or with `last`, or where no best one was kept, that of its last checkpoint; verified."""
    config = config_of(run)
    if not last and (run / "best").is_dir():
        return load(run / "best")
    checkpoints = list_checkpoints(run / "checkpoints")
    if not checkpoints:
        raise CheckpointError(f"{run}: holds neither a best model nor a checkpoint; has it been trained?")
    from .operate import apply

    task = LanguageModelling.open(config)
    model = build_for_run(config.model, task.data.vocab_size, config.data.sequence_length, config.seed)
    apply(model, config.method, config.seed)
    restore_record(checkpoints[-1], model)
    load_model(checkpoints[-1], model)
    return model.eval()


def find_model(name: str, seed: int = 0) -> tuple[PreTrainedModel, Method | None]:
    """A model, and the method that is still to be applied to it if what was named says so.

    `name` is a run's config file (its model, untrained, and its method), a run's folder (its model as trained), or
    anything that `build_model` takes.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):
        config = RunConfig.load(path)
        task = LanguageModelling.open(config)
        model = build_for_run(config.model, task.data.vocab_size, config.data.sequence_length, config.seed)
        return model, config.method
    if path.is_dir() and is_run(path):
        return load_run(path), None
    return build_model(name, seed), None


def evaluate_run(run: Path, batch_size: int = 16, last: bool = False) -> dict[str, Any]:
    """Validation loss, perplexity and bits per byte of a run's model on all of its validation data, in float32."""
    config = config_of(run)
    task = LanguageModelling.open(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model: Any = load_run(run, last).to(device)
    loss = validation_loss(SummedLoss(model), task, World(0, 1, device), batch_size)
    return {
        "run": str(run),
        "val_loss": loss,
        "perplexity": math.exp(loss),
        "bits_per_byte": loss / math.log(2) / task.bytes_per_token,
        "tokens": len(task.held_out) * task.length,
        "data": task.data.description,
        "synthetic": task.data.synthetic,
    }


def generate_text(run: Path, prompt: str, tokens: int, temperature: float, top_k: int, seed: int) -> str:
    """A text that starts with the prompt, by a run's model. Longer than its positions, the oldest tokens are let go."""
    config = config_of(run)
    model: Any = load_run(run)
    tokenizer = LanguageModelling.open(config).data.load_tokenizer()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
    room = getattr(model.config, "max_position_embeddings", None)
    if ids.shape[1] == 0:
        raise ConfigError("the prompt is empty: give at least one word")
    if room is not None and ids.shape[1] + tokens > room:
        if tokens >= room:
            raise ConfigError(f"{tokens} tokens do not fit the model's {room} positions; ask for fewer")
        ids = ids[:, -(room - tokens) :]
    torch.manual_seed(seed)
    how: dict[str, Any] = {"do_sample": temperature > 0}
    if temperature > 0:
        how |= {"temperature": temperature, "top_k": top_k or None}
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=tokens,
        pad_token_id=tokenizer.eos_token_id or 0,
        eos_token_id=tokenizer.eos_token_id,
        **how,
    )
    return str(tokenizer.decode(out[0], skip_special_tokens=True))
