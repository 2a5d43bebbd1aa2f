"""The best model of a run: saved in transformers' format in the run's best/, with its tokenizer and its step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from ..base.files import new_folder, read_record, require_space, write_json
from ..base.manifest import FileMark, check_files, files_in, read_manifest, write_manifest
from ..errors import CheckpointError, FileError
from ..models.load import load
from .parallel import World, is_sharded
from .tasks.base import Task

_STEP = "step.json"


def save_best_model(path: Path, model: nn.Module, task: Task, step: int, world: World) -> None:
    """Write the model and its tokenizer, for `oelm generate` and `oelm export` to read. Every process calls this."""
    state_dict = None
    if is_sharded(model):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        state_dict = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if world.main:
        require_space(path.parent, sum(p.numel() * p.element_size() for p in model.parameters()))
        saved: Any = model
        with new_folder(path) as folder:
            saved.save_pretrained(folder, state_dict=state_dict)
            task.save_tokenizer(folder)
            write_json(folder / _STEP, {"step": step})
            write_manifest(folder, {name: FileMark.of(folder / name) for name in files_in(folder)})
    world.barrier()


def load_best_model(folder: Path) -> PreTrainedModel:
    """Load the model in a run's best/, all of whose files must be as they were written."""
    _require_unchanged(folder)
    return load(folder)


def model_step(folder: Path) -> int:
    """Return the step of the model in a checkpoint's folder or in best/."""
    if folder.name.startswith("step-"):
        return int(folder.name.removeprefix("step-"))
    _require_unchanged(folder, _STEP)
    return int(read_record(folder / _STEP)["step"])


def _require_unchanged(folder: Path, *names: str) -> None:
    """Raise unless these files in best/, or all of them, are as they were written."""
    try:
        check_files(folder, names or read_manifest(folder))
    except FileError as error:
        raise CheckpointError(f"{error}. Its run saves it again where it is resumed before its last step") from None


def stale_best_model(run: Path, best: dict[str, Any], done: int) -> str:
    """Return why a run's best/ is not its best model, or an empty string when it is.

    `best` are the metrics of the best validation in the first `done` steps. A model of a later step is newer than these
    metrics: the model is saved at once, the metrics with the next checkpoint.
    """
    step = model_step(run / "best")
    if step > done or step == best.get("step"):
        return ""
    return f"best/ was saved at step {step}, but the best validation was at step {best.get('step')}"
