"""The tools that a user would pick instead, whose training steps are timed beside the arms.

`HfTrainer` is transformers' Trainer, `NanoGpt` the model of the user's own clone of nanoGPT in its kind of loop.
"""

from __future__ import annotations

import importlib.util
import io
import logging
import tempfile
import threading
from collections.abc import Generator
from contextlib import nullcontext, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForCausalLM,
    PrinterCallback,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    default_data_collator,
)

from ..config import GPT, RunConfig
from ..errors import ConfigError, OelmError, first_line
from ..models.convert import plain_form
from ..training.parallel import World
from ..training.step import uses_bfloat16, uses_compile
from ..training.tasks.base import Task
from .trainers import TimedTrainer, task_and_model

HF_TRAINER, NANOGPT = "hf-trainer", "nanogpt"
# Steps that a peer is asked for: it is stopped when the benchmark ends.
_ENDLESS = 10**9


@dataclass(frozen=True)
class Peer:
    """Another tool to time beside the arms: its name and, for nanoGPT, the folder of a clone."""

    name: str
    folder: Path | None = None

    @classmethod
    def parse(cls, text: str) -> Peer:
        """Return the peer that `hf-trainer` or `nanogpt=FOLDER` names."""
        name, _, folder = text.partition("=")
        if name == HF_TRAINER and not folder:
            return cls(name)
        if name != NANOGPT or not folder:
            raise ConfigError(f"--peer {text}: is {HF_TRAINER}, or {NANOGPT}=FOLDER with a clone of nanoGPT")
        if not (Path(folder) / "model.py").is_file():
            raise ConfigError(f"--peer {text}: {folder} has no model.py; it is not a clone of nanoGPT")
        return cls(name, Path(folder).expanduser())

    def trainer(self, config: RunConfig, world: World, seed: int) -> TimedTrainer:
        """Return the peer's trainer, with a model of the size that `config` has."""
        if self.folder is None:
            return HfTrainer(config, world, seed)
        return NanoGpt(self.folder, config, world, seed)


class HfTrainer(TimedTrainer):
    """transformers' Trainer on the plain model of the same size, in bf16, compiled and with fused AdamW as the arms.

    It runs in a thread of its own, which waits for its turn at the end of every step.
    """

    def __init__(self, config: RunConfig, world: World, seed: int) -> None:
        super().__init__(HF_TRAINER, config, world.device)
        task, model = task_and_model(config, seed)
        if config.model.name.startswith(GPT):
            model = AutoModelForCausalLM.from_config(plain_form(model.config).config(model.config))
        model.to(world.device)
        self._count(model, task, task.loss(model))
        on_gpu, train = world.device.type == "cuda", config.train
        micro = train.micro_batch_size or train.batch_size
        folder = self._at_end.enter_context(tempfile.TemporaryDirectory(prefix="oelm-bench-"))
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=_ENDLESS,
            per_device_train_batch_size=micro,
            gradient_accumulation_steps=train.batch_size // micro,
            learning_rate=config.optimizer.learning_rate,
            weight_decay=config.optimizer.weight_decay,
            max_grad_norm=config.optimizer.clip,
            optim="adamw_torch_fused" if on_gpu else "adamw_torch",
            bf16=uses_bfloat16(config, world.device),
            torch_compile=uses_compile(config, world.device, task),
            use_cpu=not on_gpu,
            logging_strategy="no",
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            seed=seed,
        )
        self._turns = _Turns()
        rows = _Rows(task, train.batch_size)
        trainer = Trainer(
            model, arguments, train_dataset=rows, data_collator=default_data_collator, callbacks=[self._turns]
        )
        trainer.remove_callback(PrinterCallback)
        self._thread = threading.Thread(target=self._turns.run, args=(trainer,), daemon=True)

    def step(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
            self._at_end.callback(self._thread.join)
            self._at_end.callback(self._turns.end)
        self._turns.take()


class _Turns(TrainerCallback):  # type: ignore[misc]
    """Lets a Trainer in another thread take one step at a time."""

    def __init__(self) -> None:
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._ending = False
        self._error: BaseException | None = None

    def run(self, trainer: Trainer) -> None:
        self._go.acquire()
        logging.getLogger("transformers").setLevel(logging.ERROR)
        try:
            trainer.train()
        except BaseException as error:  # noqa: BLE001 - it is raised in the thread that waits for the step
            self._error = error
        self._done.release()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> Any:
        self._done.release()
        self._go.acquire()
        control.should_training_stop = self._ending
        return control

    def take(self) -> None:
        """Let the Trainer take a step, and wait for it; raise what it raised."""
        self._go.release()
        self._done.acquire()
        if self._error is not None:
            raise OelmError(f"{HF_TRAINER}: {type(self._error).__name__}: {first_line(self._error)}") from self._error

    def end(self) -> None:
        """Let the Trainer leave its loop."""
        self._ending = True
        self._go.release()


class _Rows(Dataset[dict[str, Tensor]]):
    """A task's samples one by one, as a Trainer takes them. Its models shift the labels of a language model.

    They are made beforehand, so that the Trainer's time is its own.
    """

    def __init__(self, task: Task, batch: int) -> None:
        self._rows: list[dict[str, Tensor]] = []
        for index in range(task.samples_per_epoch // batch * batch):
            row = {name: values[0] for name, values in task.batch(index, 1).items()}
            self._rows.append({"input_ids": row["inputs"], "labels": row["inputs"]} if "targets" in row else row)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self._rows[index]


class NanoGpt(TimedTrainer):
    """The model of a clone of nanoGPT in a loop like its own: a batch ahead, autocast, clip, fused AdamW, compiled.

    It has the clone's own vocabulary for GPT-2's tokens, 50,304.
    """

    def __init__(self, folder: Path, config: RunConfig, world: World, seed: int) -> None:
        super().__init__(NANOGPT, config, world.device)
        if not config.model.name.startswith(GPT) or config.train.micro_batch_size is not None:
            raise ConfigError(f"--peer {NANOGPT} is timed beside --model gpt:SIZE, without micro-batches")
        task, ours = task_and_model(config, seed)
        self._count(ours.to(world.device), task, task.loss(ours))
        shape, length = ours.config, config.data.sequence_length
        module = _module_of(folder / "model.py")
        vocabulary = {} if shape.vocab_size == _GPT2_VOCABULARY else {"vocab_size": shape.vocab_size}
        sizes = {"n_layer": shape.num_hidden_layers, "n_head": shape.num_attention_heads, "n_embd": shape.hidden_size}
        options = {"block_size": length, "bias": shape.biases, "dropout": shape.dropout}
        optimizer = config.optimizer
        betas = optimizer.beta1, optimizer.beta2
        with redirect_stdout(io.StringIO()):  # the clone prints what it builds
            model = module.GPT(module.GPTConfig(**sizes, **options, **vocabulary)).to(world.device)
            self._optimizer = model.configure_optimizers(
                optimizer.weight_decay, optimizer.learning_rate, betas, world.device.type
            )
        self.trainable = sum(p.numel() for p in model.parameters())
        self._parameters, self._clip = list(model.parameters()), optimizer.clip
        self._model = torch.compile(model) if uses_compile(config, world.device, task) else model
        bf16 = uses_bfloat16(config, world.device)
        self._autocast = torch.autocast(world.device.type, torch.bfloat16) if bf16 else nullcontext()
        self._batches = self._read(shape.vocab_size, length, seed)
        self._at_end.callback(self._batches.close)
        self._next = next(self._batches)

    def step(self) -> None:
        inputs, targets = self._next
        with self._autocast:
            _, loss = self._model(inputs, targets)
        self._next = next(self._batches)  # while the device is still busy with the forward pass
        loss.backward()
        if self._clip:
            torch.nn.utils.clip_grad_norm_(self._parameters, self._clip)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _read(self, vocabulary: int, length: int, seed: int) -> Generator[tuple[Tensor, Tensor]]:
        """Yield batches as the clone reads them: rows from random places of a file, which is opened for each batch."""
        batch = self.config.train.batch_size
        with tempfile.TemporaryDirectory(prefix="oelm-bench-") as folder:
            path = Path(folder) / "train.bin"
            tokens = np.random.default_rng(seed).integers(0, vocabulary, 64 * batch * length + 1)
            tokens.astype(np.uint16 if vocabulary <= 2**16 else np.uint32).tofile(path)
            while True:
                data = np.memmap(path, np.uint16 if vocabulary <= 2**16 else np.uint32, mode="r")
                places = torch.randint(len(data) - length, (batch,)).tolist()
                windows = [torch.from_numpy(data[first : first + length + 1].astype(np.int64)) for first in places]
                rows = torch.stack([window[:-1] for window in windows]), torch.stack([window[1:] for window in windows])
                if self._device.type == "cuda":
                    rows = rows[0].pin_memory(), rows[1].pin_memory()
                yield rows[0].to(self._device, non_blocking=True), rows[1].to(self._device, non_blocking=True)


# The vocabulary for which nanoGPT takes its default, 50,304.
_GPT2_VOCABULARY = 50257


def _module_of(path: Path) -> Any:
    """Return the module in a Python file that the user named."""
    spec = importlib.util.spec_from_file_location("nanogpt_model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(f"--peer {NANOGPT}: {path} cannot be run ({type(error).__name__}: {error})") from error
    return module
