"""What can be done with a run's folder after training: load its model, validate it again, let it write."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from ..base.files import read_json
from ..config import RunConfig
from ..data.labelled.prompts import to_prompt
from ..errors import CheckpointError, ConfigError
from ..method.apply import apply
from ..method.spec import Method
from ..models.build import build_model
from ..models.load import load
from ..runs.folder import config_fields
from ..training.checkpoint import list_checkpoints, load_model, read_state, restore_record, stale_best, step_of
from ..training.parallel import World, device_for
from ..training.tasks.base import Task
from ..training.tasks.classification import classify
from ..training.tasks.language import LanguageModelling
from ..training.tasks.model_tokenizer import ModelTokenizer
from ..training.tasks.open import open_task
from ..training.tasks.text2text import answer
from ..training.validation import validate, written_figures

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.txt",
    "vocab.json",
    "merges.txt",
)
# How many a model adds to a prompt unless told otherwise.
_TOKENS = 100
# Below this, scores divided by a temperature overflow.
_COLDEST = 1e-30


def is_run(path: Path) -> bool:
    """Whether a folder is a run's: it has a config of ours, not a model's."""
    config = path / "config.json"
    content = read_json(config) if config.is_file() else None
    return isinstance(content, dict) and "experiment" in content


def config_of(run: Path) -> RunConfig:
    """The config that a run's folder records."""
    if not is_run(run):
        raise ConfigError(f"{run}: not a run's folder; it has no config.json that `oelm train` wrote")
    return RunConfig.load(config_fields(read_json(run / "config.json")))


def load_run(run: Path, last: bool = False) -> PreTrainedModel:
    """A run's best model, or with `last`, or where no best one was kept, that of its last checkpoint; verified."""
    return _load_from(_place_of_model(run, last), config_of(run))


def load_named(run: Path) -> tuple[PreTrainedModel, str]:
    """What `load_run` gives, and in words which of the run's models that is."""
    place = _place_of_model(run, last=False)
    which, step = "the best model" if place.name == "best" else "the last checkpoint's model", step_of(place)
    return _load_from(place, config_of(run)), which if step is None else f"{which}, of step {step:,}"


def _load_from(place: Path, config: RunConfig) -> PreTrainedModel:
    if place.name == "best":
        return load(place)
    model = open_task(config).build_model(config)
    apply(model, config.method, config.seed)
    restore_record(place, model)
    load_model(place, model)
    return model.eval()


def _place_of_model(run: Path, last: bool) -> Path:
    """The folder in a run's that its model is to be read from."""
    checkpoints = list_checkpoints(run / "checkpoints")
    if not last and (run / "best").is_dir():
        stale = _stale(run, checkpoints)
        if not stale:
            return run / "best"
        warnings.warn(f"{run}: {stale}: the last checkpoint's model is taken", stacklevel=3)
    if not checkpoints and last and (run / "best").is_dir():
        raise CheckpointError(
            f"{run}: has no checkpoint (oelm clean removes those of finished runs); leave out --last to use its best "
            "model"
        )
    if not checkpoints:
        raise CheckpointError(f"{run}: holds neither its best model nor a checkpoint; has it been trained?")
    return checkpoints[-1]


def _stale(run: Path, checkpoints: list[Path]) -> str:
    """Why best/ is not the run's best model by what else its folder says, or nothing."""
    if (run / "result.json").is_file():
        result = read_json(run / "result.json")
        return stale_best(run, result.get("best") or {}, result["steps"])
    if not checkpoints:
        return ""
    state, _, _ = read_state(checkpoints[-1])
    return stale_best(run, state.best, state.step)


def find_model(name: str, seed: int = 0) -> tuple[PreTrainedModel, Method | None]:
    """A model, and the method that is still to be applied to it if what was named says so.

    `name` is a run's config file (its model, untrained, and its method), a run's folder (its model as trained), or
    anything that `build_model` takes.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):
        config = RunConfig.load(path)
        return open_task(config).build_model(config), config.method
    if path.is_dir() and is_run(path):
        return load_run(path), None
    return build_model(name, seed), None


def evaluate_run(run: Path, batch_size: int = 16, last: bool = False) -> dict[str, Any]:
    """The figures of a run's model on all of its validation data, and on any other labelled split, in float32."""
    config = config_of(run)
    config = config.model_copy(update={"eval": config.eval.model_copy(update={"sequences": None})})
    task = open_task(config)
    world = World(0, 1, device_for("auto"))
    place = _place_of_model(run, last)
    model: Any = _load_from(place, config).to(world.device)
    about = task.describe()

    def measured(one: Task) -> dict[str, Any]:
        return validate(one.loss(model), one, world, batch_size) | written_figures(
            model, one, world, batch_size, one.held_out_count
        )

    figures = measured(task)
    others = {name: measured(other) for name, other in task.others().items()}
    found = {
        "run": str(run),
        "model": str(place.relative_to(run)),
        "step": step_of(place),
        "val_loss": figures.pop("loss"),
        **figures,
        "examples": task.held_out_count,
        "data": about["description"],
        "synthetic": about["synthetic"],
    }
    return {**found, "evaluations": others} if others else found


def generate_text(run: Path, prompt: str, tokens: int | None, temperature: float, top_k: int, seed: int) -> str:
    """A text that starts with the prompt, by a run's model. Longer than its positions, the oldest tokens are let go.

    Without a number of new tokens there are 100, or what fits after the prompt, or after a long one half the positions.
    """
    config = config_of(run)
    if config.task.kind != "language":
        raise ConfigError(f"{run}: trained on {config.task.name}, not to continue a prompt; use `oelm predict`")
    if 0 < temperature < _COLDEST:
        raise ConfigError(f"--temperature {temperature}: too low to sample with; 0 always takes the most likely token")
    model: Any = load_run(run)
    tokenizer = LanguageModelling.open(config).data.load_tokenizer()
    device = device_for("auto")
    model.to(device)
    ids = tokenizer(prompt, return_tensors="pt").input_ids.to(device)
    room = getattr(model.config, "max_position_embeddings", None)
    if ids.shape[1] == 0:
        raise ConfigError("the prompt is empty: give at least one word")
    if room is not None and tokens is not None and tokens >= room:
        raise ConfigError(f"--tokens {tokens}: the model has {room} positions; ask for {room - 1} at most")
    if tokens is None:
        tokens = _TOKENS if room is None else min(_TOKENS, max(room - ids.shape[1], room // 2))
    if room is not None and ids.shape[1] + tokens > room:
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


def predict_one(run: Path, text: str, pair: str | None = None) -> dict[str, Any]:
    """What a fine-tuned model answers to one text or pair: a class with the probability of each, or what it writes.

    The text is read just as it was in training.
    """
    config = config_of(run)
    if config.task.kind == "language":
        raise ConfigError(f"{run}: a language model; use `oelm generate` to continue a prompt")
    if not text.strip():
        raise ConfigError("the text is empty: give at least one word")
    _require_as_in_training(run, pair)
    model, model_tokenizer = load_run(run), ModelTokenizer.of(config)
    if config.task.kind == "classification":
        return classify(model, model_tokenizer, text, pair)
    source = model_tokenizer.encode([to_prompt(config.task.name, text, pair)])
    return {"answer": answer(model, model_tokenizer, source, np.zeros(1, np.int64), model_tokenizer.max_length)[0]}


def _require_as_in_training(run: Path, pair: str | None) -> None:
    environment = run / "environment.json"
    if not environment.is_file():
        raise CheckpointError(f"{run}: has no model yet: the run has not started, or ended before its first step")
    wants_two = read_json(environment)["data"].get("pairs")
    if wants_two is not None and wants_two != (pair is not None):
        wanted = "judges pairs of texts: give two" if wants_two else "reads one text: give one"
        raise ConfigError(f"{run}: its model {wanted}")


def save_tokenizer_of(source: Path, out: Path) -> None:
    """Put the tokenizer that a run's or a saved model reads beside its exported weights, where there is one."""
    folder = source / "best" if is_run(source) else source
    if is_run(source) and not folder.is_dir():
        open_task(config_of(source)).save_tokenizer(out)
        return
    for name in _TOKENIZER_FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)
