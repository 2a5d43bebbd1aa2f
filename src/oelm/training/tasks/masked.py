"""Masked language modelling: fill gaps in windows of a token file, reading what stands before and after them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...config import RunConfig, TaskConfig
from ...data.corpus.masking import MaskedRows, Masking
from ...data.tokenizer import add_mask_token, special_ids
from ...errors import ConfigError
from ...models.run_model import build_masked_model
from .base import IGNORED, Batch, MetricDict, summed_loss
from .metrics import perplexity
from .text import TextTask, loss_by_part, open_text

# The seed of the masks that models are judged by. No run has it, so that no run trains with these masks.
_HELD_OUT_SEED = 2**64


@dataclass(frozen=True)
class MaskedLanguageModelling(TextTask):
    """Prediction of masked tokens in windows of a token file, of which the one after a window's length is left out.

    A training sequence is masked anew whenever it is read: its masks are a function of the seed and the sample's
    number. Those of the validation and test text are the same in all runs with the same settings of the masks.
    """

    masking: Masking
    padding: int
    tokenizer: Any = field(repr=False, compare=False)

    @classmethod
    def open(cls, config: RunConfig) -> MaskedLanguageModelling:
        """Open the token file of a run and check that it can be trained and validated on."""
        data, windows, held_out = open_text(config)
        tokenizer = data.load_tokenizer()
        known = set(tokenizer.get_vocab().values())
        add_mask_token(tokenizer, data.vocab_size)
        ordinary = np.zeros(max(data.vocab_size, tokenizer.mask_token_id + 1), dtype=np.bool_)
        ordinary[list(known - special_ids(tokenizer) - {data.eos_id})] = True
        padding = data.eos_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
        length = config.data.sequence_length
        masking = Masking(
            count=masked_count(config.task, length),
            mask_id=tokenizer.mask_token_id,
            ordinary=ordinary,
            token_share=config.task.mask_token_share,
            random_share=config.task.mask_random_share,
        )
        return cls(data, windows, held_out, length, masking, padding, tokenizer)

    @property
    def head_share(self) -> float:
        return self.masking.count / self.length

    def build_model(self, config: RunConfig) -> PreTrainedModel:
        ordinary = self.masking.ordinary
        model: Any = build_masked_model(config.model, len(ordinary), self.length, self.padding, config.seed)
        padding = model.get_input_embeddings().padding_idx
        if padding is not None and padding < len(ordinary) and ordinary[padding]:
            raise ConfigError(
                f"model.name {config.model.name}: a {model.config.model_type} pads texts with token {padding}, and in "
                f"the data that is {self.tokenizer.convert_ids_to_tokens(padding)!r}; name another model, such as "
                "random:bert, or use data of a tokenizer whose padding token this is"
            )
        return model

    def loss(self, model: nn.Module) -> nn.Module:
        return MaskedLoss(model)

    def batch(self, first: int, count: int) -> Batch:
        return _tensors(self.masking.mask(self._sequences(first, count), first, self.windows.seed))

    def target_count(self, first: int, count: int) -> int:
        return self.masking.targets_in(self._sequences(first, count))

    def _sequences(self, first: int, count: int) -> Any:
        return self.windows.batch(first, count)[:, :-1]

    def validation(self, first: int, count: int, fill_to: int) -> Batch:
        chosen = self.masking.count
        filled = {
            "inputs": torch.zeros(fill_to, self.length, dtype=torch.long),
            "positions": torch.zeros(fill_to, chosen, dtype=torch.long),
            "targets": torch.full((fill_to, chosen), IGNORED),
        }
        if self.on_test:
            filled["parts"] = torch.zeros(fill_to, 1, chosen, dtype=torch.long)
            filled["totals"] = torch.zeros(2, self.document_count, dtype=torch.float64)
        if count > 0:
            masked = self.masking.mask(self.held_out.sequential(first, count)[:, :-1], first, _HELD_OUT_SEED)
            for name, rows in _tensors(masked).items():
                filled[name][:count] = rows
            if self.on_test:
                places = np.arange(first, first + count)[:, None] * self.length + masked.positions
                filled["parts"][:count, 0] = torch.from_numpy(self.documents[places])
        return filled

    def metrics(self, sums: list[float]) -> MetricDict:
        loss_sum, targets, right, *by_document = sums
        loss = loss_sum / targets
        metrics: MetricDict = {
            "loss": loss,
            "masked_perplexity": perplexity(loss),
            "token_accuracy": right / targets,
        }
        return metrics | self.document_metrics(np.array(by_document).reshape(2, -1))

    def training_metrics(self, loss: float) -> dict[str, float]:
        return {"masked_perplexity": perplexity(loss)}

    def reached(self, metrics: MetricDict, target: float) -> bool:
        return bool(metrics["masked_perplexity"] <= target)

    def headline(self, metrics: MetricDict) -> str:
        return (
            f"{self.judged_split} loss {metrics['loss']:.4f}, masked perplexity {metrics['masked_perplexity']:.3f}, "
            f"token accuracy {metrics['token_accuracy']:.4f}"
        )

    def result_fields(self, last: MetricDict, best: MetricDict) -> dict[str, Any]:
        return {
            "val_loss": last["loss"],
            "masked_perplexity": last["masked_perplexity"],
            "token_accuracy": last["token_accuracy"],
            "best_val_loss": best.get("loss", math.nan),
            "best_masked_perplexity": best.get("masked_perplexity", math.nan),
            "best_step": best.get("step"),
        }

    def save_tokenizer(self, folder: Path) -> None:
        self.tokenizer.save_pretrained(folder)


def masked_count(task: TaskConfig, length: int) -> int:
    """Return how many tokens of a sequence are chosen; raise where the sequence is too short for one."""
    count = round(task.mask_share * length)
    if count == 0:
        raise ConfigError(
            f"data.sequence_length {length}: task.mask_share {task.mask_share:g} of it is less than half a token; use "
            "longer sequences or a larger share"
        )
    return count


class MaskedLoss(nn.Module):
    """Cross-entropy summed over the masked tokens, in float32; in evaluation also how many were filled in right.

    The head computes logits at `positions` alone. Every class has a head of its own kind, so it is left to the class: a
    hook takes the hidden states at these positions out of what the model's body returns.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model
        self._positions: Tensor | None = None
        model.base_model.register_forward_hook(self._take)

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        targets: Tensor,
        parts: Tensor | None = None,
        totals: Tensor | None = None,
    ) -> Tensor:
        self._positions = positions
        try:
            logits = self.model(input_ids=inputs).logits
        finally:
            self._positions = None  # other callers of the model get all of its logits
        if self.training:
            return summed_loss(logits, targets, training=True)
        right = (logits.argmax(-1) == targets).sum().double()[None]  # an ignored target is no token
        if parts is None or totals is None:
            return torch.cat([summed_loss(logits, targets, training=False), right])
        sums = loss_by_part(logits, targets, parts, totals)
        return torch.cat([sums[:2], right, sums[2:]])

    def _take(self, body: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        """Replace the hidden states that the model's body returns by those at the positions of this pass."""
        if self._positions is None:
            return output
        states = output[0]
        taken = states.gather(1, self._positions[..., None].expand(-1, -1, states.shape[-1]))
        if isinstance(output, tuple):
            return taken, *output[1:]
        output.last_hidden_state = taken
        return output


def _tensors(masked: MaskedRows) -> Batch:
    return {name: torch.from_numpy(rows) for name, rows in masked._asdict().items()}
