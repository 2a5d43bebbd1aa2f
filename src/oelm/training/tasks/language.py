"""Language modelling: predict the next token at every position, over windows of a token file.

Models are chosen by the validation text, and judged once, at the end, by the test text, document by document.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedModel

from ...config import RunConfig
from ...data.corpus.batches import Windows
from ...data.corpus.tokens import Split, TokenDataset
from ...data.labelled.tasks import BUILTIN
from ...data.synthetic.story_corpus import builtin
from ...errors import ConfigError
from ...models.gpt import OelmGPTForCausalLM
from ...models.run_model import build_language_model
from .base import IGNORED, Batch, MetricDict, Task, summed_loss
from .metrics import perplexity
from .slices import PairFrequencies, Slices

# A test text of more documents is divided into this many parts, each of documents that follow each other.
_MOST_PARTS = 4096


@dataclass(frozen=True)
class LanguageModelling(Task):
    """Next-token prediction over windows of a token file. A batch is a function of the seed and the sample numbers.

    `held_out` are the windows of the text that the model is validated on: the validation text or, `on_test`, the test
    text. The losses of both are summed for each slice, those of the test text for each document too.
    """

    data: TokenDataset
    windows: Windows
    held_out: Windows
    length: int
    frequencies: PairFrequencies
    on_test: bool = False

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
        held_out = Windows(data.val.tokens, length, text="the validation text")
        return cls(data, windows, held_out, length, PairFrequencies(windows.tokens, data.vocab_size))

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
        documents = int(self.documents[-1]) + 1 if self.on_test else 0
        filled["parts"] = torch.zeros(fill_to, 1 + self.on_test, self.length, dtype=torch.long)
        filled["totals"] = torch.zeros(2, self.slices.count + documents, dtype=torch.float64)
        if count > 0:
            filled["parts"][:count] = torch.from_numpy(self._parts(first, count))
        return filled

    def _parts(self, first: int, count: int) -> npt.NDArray[np.int64]:
        """Return the parts whose sums the targets of some windows count in, in rows: a slice, then a document."""
        parts = [self.slices.numbers(first, count).astype(np.int64)]
        if self.on_test:
            first_target = first * self.length + 1  # targets are the tokens after the inputs, one place further
            documents = self.documents[first_target : first_target + count * self.length]
            parts.append(self.slices.count + documents.reshape(count, self.length))
        return np.stack(parts, axis=1)

    @cached_property
    def slices(self) -> Slices:
        """Return the slices of the judged text's windows."""
        return Slices(self.held_out, self.frequencies)

    @cached_property
    def documents(self) -> npt.NDArray[np.int64]:
        """Return for each token of the judged text's windows the number of its document, or of a part of several."""
        ends = np.asarray(self.held_out.tokens[: len(self.held_out) * self.length + 1]) == self.data.eos_id
        document = np.concatenate([[0], np.cumsum(ends[:-1])])
        documents = int(document[-1]) + 1
        return document if documents <= _MOST_PARTS else document * _MOST_PARTS // documents

    def metrics(self, sums: list[float]) -> MetricDict:
        text = self._judged_text()
        loss, bytes_per_token = sums[0] / sums[1], text.bytes / len(text.tokens)
        by_slice, by_document = np.split(np.array(sums[2:]).reshape(2, -1), [self.slices.count], axis=1)
        # The loss is in nats per token.
        metrics: MetricDict = {
            "loss": loss,
            "perplexity": perplexity(loss),
            "bits_per_byte": loss / math.log(2) / bytes_per_token,
            "slices": self.slices.by_part(*by_slice),
        }
        if self.on_test:
            metrics["document_losses"] = by_document[0].tolist()
            metrics["document_tokens"] = by_document[1].astype(int).tolist()
        return metrics

    def other_splits(self) -> dict[str, Task]:
        if self.data.test is None:
            return {}
        held_out = Windows(self.data.test.tokens, self.length, text="the test text")
        return {"test": replace(self, held_out=held_out, on_test=True)}

    def _judged_text(self) -> Split:
        text = self.data.test if self.on_test else self.data.val
        assert text is not None
        return text

    def reached(self, metrics: MetricDict, target: float) -> bool:
        return bool(metrics["perplexity"] <= target)

    def headline(self, metrics: MetricDict) -> str:
        split = "test" if self.on_test else "validation"
        return f"{split} loss {metrics['loss']:.4f}, perplexity {metrics['perplexity']:.3f}"

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


def open_dataset(path: str) -> TokenDataset:
    """Open a prepared folder, or make the built-in data that `builtin:NAME` names."""
    return builtin(path.removeprefix(BUILTIN)) if path.startswith(BUILTIN) else TokenDataset.open(path)


class SummedLoss(nn.Module):
    """Cross-entropy summed over all targets that are not ignored, in float32.

    In evaluation, with the numbers of one or several parts for each target, also summed for each part, with the
    targets' number; `totals` are zeros for these sums.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, inputs: Tensor, targets: Tensor, parts: Tensor | None = None, totals: Tensor | None = None
    ) -> Tensor:
        if self.training and isinstance(self.model, OelmGPTForCausalLM):
            loss: Tensor = self.model(input_ids=inputs, targets=targets, use_cache=False).loss
            return loss
        logits = self.model(input_ids=inputs, use_cache=False).logits
        if parts is None or totals is None:
            return summed_loss(logits, targets, self.training)
        # What cross_entropy does, in its two steps: the first, which takes the time, serves the sum and the losses.
        scores, flat_targets = F.log_softmax(logits.flatten(0, -2).float(), dim=-1), targets.flatten()
        loss = F.nll_loss(scores, flat_targets, ignore_index=IGNORED, reduction="sum")
        losses = F.nll_loss(scores, flat_targets, ignore_index=IGNORED, reduction="none")
        counted = (flat_targets != IGNORED).double()  # an ignored target has a loss of 0
        of_targets = torch.stack([losses.double(), counted]).view(2, -1, 1, targets.shape[1])
        of_parts = of_targets.expand(-1, -1, parts.shape[1], -1).flatten(1)
        by_part = totals.index_add(1, parts.flatten(), of_parts)
        return torch.cat([loss.double()[None], counted.sum()[None], by_part.flatten()])


def _split(windows: Tensor) -> Batch:
    """Split windows of length + 1 tokens into inputs and the tokens that follow them."""
    return {"inputs": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}
