"""Language modelling: predict the next token at every position, over windows of a token file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...config import RunConfig
from ...data.corpus.batches import Windows
from ...data.corpus.tokens import TokenDataset
from ...data.labelled.tasks import BUILTIN
from ...data.synthetic.story_corpus import builtin
from ...errors import ConfigError
from ...models.run_model import build_language_model
from .base import IGNORED, Batch, MetricDict, Task, summed_loss
from .metrics import perplexity


@dataclass(frozen=True)
class LanguageModelling(Task):
    """Next-token prediction over windows of a token file. A batch is a function of the seed and the sample numbers."""

    data: TokenDataset
    windows: Windows
    held_out: Windows
    length: int

    fixed_shapes = True

    @classmethod
    def open(cls, config: RunConfig) -> LanguageModelling:
        """Open the token file of a run and check that it can be trained and validated on."""
        if config.data.path is None:
            raise ConfigError("data.path: name a folder that `oelm data prepare` wrote, or builtin:stories")
        data = open_dataset(config.data.path)
        data.verify()  # the run's record names the data by these hashes
        if data.val is None:
            raise ConfigError(
                f"data.path {config.data.path}: it has no validation tokens; prepare it again with a validation split"
            )
        if config.checkpoint.best:
            data.load_tokenizer()  # it is saved with the best model, and an error should come before the first step
        length = config.data.sequence_length
        windows = Windows(data.train.tokens, length, config.data_seed, config.data.fraction, "the training text")
        return cls(data, windows, Windows(data.val.tokens, length, text="the validation text"), length)

    @property
    def samples_per_epoch(self) -> int:
        return len(self.windows)

    @property
    def held_out_count(self) -> int:
        return len(self.held_out)

    @property
    def sha256(self) -> str:
        return self.data.sha256

    def build_model(self, config: RunConfig) -> PreTrainedModel:
        model = build_language_model(config.model, self.data.vocab_size, self.length, config.seed)
        if "eos_token_id" not in config.model.fields:  # generation stops where a text ends
            model.config.eos_token_id = self.data.eos_id
            generation_config = getattr(model, "generation_config", None)  # a class may do without GenerationMixin
            if generation_config is not None:
                generation_config.eos_token_id = self.data.eos_id
        return model

    def loss(self, model: nn.Module) -> nn.Module:
        return SummedLoss(model)

    def batch(self, first: int, count: int) -> Batch:
        return _split(torch.from_numpy(self.windows.batch(first, count)))

    def target_count(self, first: int, count: int) -> int:
        return count * self.length

    def token_count(self, first: int, count: int) -> int:
        return count * self.length

    def validation(self, first: int, count: int, fill_to: int) -> Batch:
        filled = {
            "inputs": torch.zeros(fill_to, self.length, dtype=torch.long),
            "targets": torch.full((fill_to, self.length), IGNORED),
        }
        if count > 0:
            for name, rows in _split(torch.from_numpy(self.held_out.sequential(first, count))).items():
                filled[name][:count] = rows
        return filled

    def metrics(self, sums: list[float]) -> MetricDict:
        assert self.data.val is not None
        loss, bytes_per_token = sums[0] / sums[1], self.data.val.bytes / len(self.data.val.tokens)
        # The loss is in nats per token.
        return {"loss": loss, "perplexity": perplexity(loss), "bits_per_byte": loss / math.log(2) / bytes_per_token}

    def reached(self, metrics: MetricDict, target: float) -> bool:
        return bool(metrics["perplexity"] <= target)

    def headline(self, metrics: MetricDict) -> str:
        return f"validation loss {metrics['loss']:.4f}, perplexity {metrics['perplexity']:.3f}"

    def result_fields(self, last: MetricDict, best: MetricDict) -> dict[str, Any]:
        return {
            "val_loss": last["loss"],
            "perplexity": last["perplexity"],
            "bits_per_byte": last["bits_per_byte"],
            "best_val_loss": best.get("loss", math.nan),
            "best_perplexity": best.get("perplexity", math.nan),
            "best_step": best.get("step"),
        }

    def warnings(self) -> list[str]:
        return [self.data.overlap] if self.data.overlap else []

    def describe(self) -> dict[str, Any]:
        splits = {"train": self.data.train, "val": self.data.val}
        return {
            "description": self.data.description,
            "synthetic": self.data.synthetic,
            "vocab_size": self.data.vocab_size,
            "tokenizer": self.data.tokenizer_hash,
            "splits": {
                name: {"tokens": len(split.tokens), "documents": split.documents, "sha256": split.sha256}
                for name, split in splits.items()
                if split is not None
            },
        }

    def save_tokenizer(self, folder: Path) -> None:
        self.data.load_tokenizer().save_pretrained(folder)


def open_dataset(path: str) -> TokenDataset:
    """Open a prepared folder, or make the built-in data that `builtin:NAME` names."""
    return builtin(path.removeprefix(BUILTIN)) if path.startswith(BUILTIN) else TokenDataset.open(path)


class SummedLoss(nn.Module):
    """Cross-entropy summed over all targets that are not ignored, in float32."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        logits = self.model(input_ids=inputs, use_cache=False).logits
        return summed_loss(logits, targets, self.training)


def _split(windows: Tensor) -> Batch:
    """Split windows of length + 1 tokens into inputs and the tokens that follow them."""
    return {"inputs": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}
