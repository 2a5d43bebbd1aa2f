"""Language modelling: predict the next token at every position, over windows of a token file."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...config import RunConfig
from ...data.corpus.tokens import Split
from ...models.gpt import OelmGPTForCausalLM
from ...models.run_model import build_language_model
from .base import IGNORED, Batch, MetricDict, summed_loss
from .metrics import perplexity
from .slices import PairFrequencies, Slices
from .text import TextTask, loss_by_part, open_text


@dataclass(frozen=True)
class LanguageModelling(TextTask):
    """Next-token prediction over windows of a token file. A batch is a function of the seed and the sample numbers.

    The losses of the text that is judged are summed for each slice, those of the test text for each document too.
    """

    frequencies: PairFrequencies

    @classmethod
    def open(cls, config: RunConfig) -> LanguageModelling:
        """Open the token file of a run and check that it can be trained and validated on."""
        data, windows, held_out = open_text(config)
        if config.checkpoint.best:
            data.load_tokenizer()  # it is saved with the best model, and an error should come before the first step
        frequencies = PairFrequencies(windows.tokens, data.vocab_size)
        return cls(data, windows, held_out, config.data.sequence_length, frequencies)

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

    def validation(self, first: int, count: int, fill_to: int) -> Batch:
        filled = {
            "inputs": torch.zeros(fill_to, self.length, dtype=torch.long),
            "targets": torch.full((fill_to, self.length), IGNORED),
        }
        if count > 0:
            for name, rows in _split(torch.from_numpy(self.held_out.sequential(first, count))).items():
                filled[name][:count] = rows
        filled["parts"] = torch.zeros(fill_to, 1 + self.on_test, self.length, dtype=torch.long)
        filled["totals"] = torch.zeros(2, self.slices.count + self.document_count, dtype=torch.float64)
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
        return metrics | self.document_metrics(by_document)

    def training_metrics(self, loss: float) -> dict[str, float]:
        return {"perplexity": perplexity(loss)}

    def _judged_text(self) -> Split:
        text = self.data.test if self.on_test else self.data.val
        assert text is not None
        return text

    def reached(self, metrics: MetricDict, target: float) -> bool:
        return bool(metrics["perplexity"] <= target)

    def headline(self, metrics: MetricDict) -> str:
        return f"{self.judged_split} loss {metrics['loss']:.4f}, perplexity {metrics['perplexity']:.3f}"

    def result_fields(self, last: MetricDict, best: MetricDict) -> dict[str, Any]:
        return {
            "val_loss": last["loss"],
            "perplexity": last["perplexity"],
            "bits_per_byte": last["bits_per_byte"],
            "best_val_loss": best.get("loss", math.nan),
            "best_perplexity": best.get("perplexity", math.nan),
            "best_step": best.get("step"),
        }


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
        return loss_by_part(logits, targets, parts, totals)


def _split(windows: Tensor) -> Batch:
    """Split windows of length + 1 tokens into inputs and the tokens that follow them."""
    return {"inputs": windows[:, :-1].contiguous(), "targets": windows[:, 1:].contiguous()}
