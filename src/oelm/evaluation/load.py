"""Load the model or the tokenizer of a run's folder."""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from ..config import RunConfig
from ..data.tokenizer import load_model_tokenizer
from ..errors import CheckpointError, ConfigError
from ..method.apply import apply
from ..method.spec import Method
from ..models.load import build_model
from ..runs.environment import config_of, is_run
from ..runs.schema import Result, read
from ..training.best import load_best_model, model_step, stale_best_model
from ..training.checkpoint import list_checkpoints, read_checkpoint
from ..training.length import resolved_method
from ..training.tasks.language import LanguageModelling
from ..training.tasks.open import open_task

# What to do with a run of masked language modelling, which neither continues a text nor predicts a class.
FILLS_MASKS = (
    "trained to fill masks; `oelm eval` measures that, and transformers' pipeline('fill-mask') fills them with what "
    "`oelm export` writes"
)
# The files that a saved tokenizer may consist of.
_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "vocab.txt", "vocab.json", "merges.txt")


def load_run(run: Path, last: bool = False) -> PreTrainedModel:
    """Return a run's best model, verified; with `last`, or if no best one was saved, that of its last checkpoint."""
    return load_model_folder(model_folder(run, last), config_of(run))


def load_run_with_label(run: Path, last: bool = False) -> tuple[PreTrainedModel, str]:
    """Return the model of `load_run`, and a description of which of the run's models it is."""
    folder = model_folder(run, last)
    label = "the best model" if folder.name == "best" else "the last checkpoint's model"
    return load_model_folder(folder, config_of(run)), f"{label}, of step {model_step(folder):,}"


def load_language_model(source: Path, last: bool = False) -> tuple[Any, Any]:
    """Return the language model of a run or of any folder, and its tokenizer; raise for one that continues no text."""
    if is_run(source):
        config = config_of(source)
        if config.task.kind == "masked-language":
            raise ConfigError(f"{source}: {FILLS_MASKS}")
        if config.task.kind != "language":
            raise ConfigError(f"{source}: trained on {config.task.name}, not to continue a prompt; use `oelm predict`")
        folder = model_folder(source, last)
        if folder.name == "best":  # it has the tokenizer beside the model: the run may have left its data behind
            return load_model_folder(folder, config), load_model_tokenizer(folder)
        return load_model_folder(folder, config), LanguageModelling.open(config).data.load_tokenizer()
    model = build_model(str(source))
    if not model.can_generate() or model.config.is_encoder_decoder:
        raise ConfigError(f"{source}: a {type(model).__name__} does not continue a prompt; name a language model")
    return model, load_model_tokenizer(source)


def find_model(name: str, seed: int = 0) -> tuple[PreTrainedModel, Method | None]:
    """Return a model, and the method that is still to be applied to it, if any.

    `name` is a run's config file (its untrained model and its method), a run's folder (its trained model), or anything
    that `build_model` takes.
    """
    path = Path(name)
    if path.suffix in (".yaml", ".yml", ".json"):
        config = RunConfig.load(path)
        task = open_task(config)
        return task.build_model(config), resolved_method(config, task.samples_per_epoch)
    if path.is_dir() and is_run(path):
        return load_run(path), None
    return build_model(name, seed), None


def save_tokenizer(source: Path, out: Path) -> None:
    """Write the tokenizer of a run or of a saved model into the folder `out`, if it has one."""
    folder = source / "best" if is_run(source) else source
    if is_run(source) and not folder.is_dir():
        open_task(config_of(source)).save_tokenizer(out)
        return
    for name in _FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, out / name)


def model_folder(run: Path, last: bool) -> Path:
    """Return the folder with a run's model: best/ or, with `last` or where best/ is missing or stale, a checkpoint."""
    checkpoints = list_checkpoints(run / "checkpoints")
    has_best = (run / "best").is_dir()
    if not last and has_best:
        problem = _why_best_is_stale(run, checkpoints)
        if not problem:
            return run / "best"
        warnings.warn(f"{run}: {problem}; using the last checkpoint's model", stacklevel=3)
    if checkpoints:
        return checkpoints[-1]
    if last and has_best:
        raise CheckpointError(
            f"{run}: has no checkpoint (oelm clean removes those of finished runs); leave out --last to use its best "
            "model"
        )
    raise CheckpointError(f"{run}: holds neither its best model nor a checkpoint; has it been trained?")


def load_model_folder(folder: Path, config: RunConfig) -> PreTrainedModel:
    """Return the model in best/ or in a checkpoint's folder of the run with this config."""
    if folder.name == "best":
        return load_best_model(folder)
    task = open_task(config)
    model = task.build_model(config)
    apply(model, resolved_method(config, task.samples_per_epoch), config.seed)
    checkpoint = read_checkpoint(folder)
    checkpoint.restore_frozen(model)
    checkpoint.load(model)
    return model.eval()


def _why_best_is_stale(run: Path, checkpoints: list[Path]) -> str:
    """Return why best/ is not the run's best model, judged by its result or last checkpoint, or an empty string."""
    if (run / "result.json").is_file():
        result = read(run / "result.json", Result)
        return stale_best_model(run, {"step": result.best.step} if result.best is not None else {}, result.steps)
    if not checkpoints:
        return ""
    state = read_checkpoint(checkpoints[-1]).state
    return stale_best_model(run, state.best, state.step)
