"""The base of language modelling and masked language modelling: windows of a token file.

Models are chosen by the validation text, and judged once, at the end, by the test text, document by document.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional as F

from ...config import RunConfig
from ...data.corpus.batches import Windows
from ...data.corpus.tokens import TokenDataset
from ...data.labelled.tasks import BUILTIN
from ...data.synthetic.story_corpus import builtin
from ...errors import ConfigError
from .base import IGNORED, MetricDict, Task

# A test text of more documents is divided into this many parts, each of documents that follow each other.
_MOST_PARTS = 4096


@dataclass(frozen=True)
class TextTask(Task):
    """A task on windows of a token file, each of `length` tokens and the one after them.

    `held_out` are the windows of the text that the model is validated on: the validation text or, `on_test`, the test
    text, whose losses are also summed for each document.
    """

    data: TokenDataset
    windows: Windows
    held_out: Windows
    length: int
    on_test: bool = field(default=False, kw_only=True)

    fixed_shapes = True

    @property
    def samples_per_epoch(self) -> int:
        return len(self.windows)

    @property
    def held_out_count(self) -> int:
        return len(self.held_out)

    @property
    def sha256(self) -> str:
        return self.data.sha256

    def token_count(self, first: int, count: int) -> int:
        return count * self.length

    def other_splits(self) -> dict[str, Task]:
        if self.data.test is None:
            return {}
        held_out = Windows(self.data.test.tokens, self.length, text="the test text")
        return {"test": replace(self, held_out=held_out, on_test=True)}

    @cached_property
    def documents(self) -> npt.NDArray[np.int64]:
        """Return for each token of the judged text's windows the number of its document, or of a part of several."""
        ends = np.asarray(self.held_out.tokens[: len(self.held_out) * self.length + 1]) == self.data.eos_id
        document = np.concatenate([[0], np.cumsum(ends[:-1])])
        documents = int(document[-1]) + 1
        return document if documents <= _MOST_PARTS else document * _MOST_PARTS // documents

    @property
    def document_count(self) -> int:
        """Return the number of documents, or of parts of several, whose losses are summed: none on validation text."""
        return int(self.documents[-1]) + 1 if self.on_test else 0

    def document_metrics(self, sums: npt.NDArray[np.float64]) -> MetricDict:
        """Return the metrics of the test text's documents from their summed losses and their targets, in two rows."""
        if not self.on_test:
            return {}
        return {"document_losses": sums[0].tolist(), "document_tokens": sums[1].astype(int).tolist()}

    def warnings(self) -> list[str]:
        return [self.data.overlap] if self.data.overlap else []

    def describe(self) -> dict[str, Any]:
        splits = {"train": self.data.train, "val": self.data.val, "test": self.data.test}
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

    @property
    def judged_split(self) -> str:
        """Return the name of the text that metrics are measured on, for the terminal."""
        return "test" if self.on_test else "validation"


def open_text(config: RunConfig) -> tuple[TokenDataset, Windows, Windows]:
    """Open the token file of a run and check that it can be trained and validated on.

    Return it with the windows of its training text, in the run's order, and of its validation text.
    """
    if config.data.path is None:
        raise ConfigError("data.path: name a folder that `oelm data prepare` wrote, or builtin:stories")
    data = open_dataset(config.data.path)
    data.verify()  # the run's record names the data by these hashes
    if data.val is None:
        raise ConfigError(
            f"data.path {config.data.path}: it has no validation tokens; prepare it again with a validation split"
        )
    length = config.data.sequence_length
    windows = Windows(data.train.tokens, length, config.data_seed, config.data.fraction, "the training text")
    return data, windows, Windows(data.val.tokens, length, text="the validation text")


def open_dataset(path: str) -> TokenDataset:
    """Open a prepared folder, or make the built-in data that `builtin:NAME` names."""
    return builtin(path.removeprefix(BUILTIN)) if path.startswith(BUILTIN) else TokenDataset.open(path)


def loss_by_part(logits: Tensor, targets: Tensor, parts: Tensor, totals: Tensor) -> Tensor:
    """Return the vector of the summed loss, the number of targets, and both for each part.

    `parts` has the numbers of one or several parts for each target, in rows; `totals` are zeros for the parts' sums.
    """
    # What cross_entropy does, in its two steps: the first, which takes the time, serves the sum and the losses.
    scores, flat_targets = F.log_softmax(logits.flatten(0, -2).float(), dim=-1), targets.flatten()
    loss = F.nll_loss(scores, flat_targets, ignore_index=IGNORED, reduction="sum")
    losses = F.nll_loss(scores, flat_targets, ignore_index=IGNORED, reduction="none")
    counted = (flat_targets != IGNORED).double()  # an ignored target has a loss of 0
    of_targets = torch.stack([losses.double(), counted]).view(2, -1, 1, targets.shape[1])
    of_parts = of_targets.expand(-1, -1, parts.shape[1], -1).flatten(1)
    by_part = totals.index_add(1, parts.flatten(), of_parts)
    return torch.cat([loss.double()[None], counted.sum()[None], by_part.flatten()])
