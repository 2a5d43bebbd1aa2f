"""What a run optimises: where its batches come from, its loss, its validation. Language modelling, here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..config import RunConfig
from ..data.batches import Windows
from ..data.stories import builtin
from ..data.tokens import TokenDataset
from ..errors import ConfigError

# The target of a position that is not to be predicted.
IGNORED = -100
BUILTIN = "builtin:"


@dataclass(frozen=True)
class LanguageModelling:
    """Next-token prediction over windows of a token file. Batches are a function of the seed and a sample's number."""

    data: TokenDataset
    windows: Windows
    held_out: Windows
    length: int

    @classmethod
    def open(cls, config: RunConfig) -> LanguageModelling:
        data = open_dataset(config.data.path)
        if data.val is None:
            raise ConfigError(f"data.path {config.data.path}: it has no validation tokens; prepare it with a split")
        length = config.data.sequence_length
        windows = Windows(data.train.tokens, length, config.data_seed, config.data.fraction)
        return cls(data, windows, Windows(data.val.tokens, length), length)

    def batch(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of the run's samples first..first+count-1."""
        windows = torch.from_numpy(self.windows.batch(first, count))
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def validation(self, first: int, count: int, fill_to: int) -> tuple[Tensor, Tensor]:
        """(inputs, targets) of validation windows in order, filled up to `fill_to` rows whose targets are ignored."""
        inputs = torch.zeros(fill_to, self.length, dtype=torch.long)
        targets = torch.full_like(inputs, IGNORED)
        if count > 0:
            windows = torch.from_numpy(self.held_out.sequential(first, count))
            inputs[:count], targets[:count] = windows[:, :-1], windows[:, 1:]
        return inputs, targets

    @property
    def bytes_per_token(self) -> float:
        """Bytes of validation text per token, for bits per byte."""
        assert self.data.val is not None
        return self.data.val.bytes / len(self.data.val.tokens)

    def describe(self) -> dict[str, Any]:
        """What the environment records of the data."""
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


def open_dataset(path: str) -> TokenDataset:
    """A prepared folder, or `builtin:NAME` for data that is made here."""
    return builtin(path.removeprefix(BUILTIN)) if path.startswith(BUILTIN) else TokenDataset.open(path)


class SummedLoss(nn.Module):
    """The model and its loss as one module, so that both are wrapped and compiled together."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Cross-entropy summed over every target that counts, in float32."""
        logits = self.model(input_ids=inputs, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), ignore_index=IGNORED, reduction="sum")
