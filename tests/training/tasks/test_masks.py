"""Masks of attention do not depend on what is in a batch, so a recorded step has those of any other step."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F
from transformers import masking_utils

from oelm.config import RunConfig
from oelm.models.masks import one_text_per_row, unread_masks
from oelm.models.small import small_model
from oelm.training.tasks.open import open_task
from tests.support import finetuning


@pytest.fixture
def masks(monkeypatch) -> list[torch.Tensor | None]:
    """Return the list of the masks that attention gets."""
    seen: list[torch.Tensor | None] = []
    attend = F.scaled_dot_product_attention

    def noting(*arguments, attn_mask=None, **options):
        seen.append(attn_mask)
        return attend(*arguments, attn_mask=attn_mask, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noting)
    return seen


@pytest.mark.parametrize("model", ["random:bert", "random:llama"])
def test_masks_are_the_same_while_a_step_is_recorded(model, tmp_path, monkeypatch, masks):
    config = RunConfig.load(finetuning.fields(tmp_path) | {"model": {"name": model}})
    task = open_task(config)
    hf_model = task.build_model(config)
    loss = task.loss(hf_model.eval())
    # For a batch without padding transformers makes no mask, if it may look.
    batches = (task.batch(first, 16) for first in range(0, task.samples_per_epoch, 16))
    full = next(batch for batch in batches if batch["attention_mask"].all())
    loss(**full)
    launched = list(masks)
    masks.clear()
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
    loss(**full)
    assert len(masks) == len(launched) == hf_model.config.num_hidden_layers
    for mask, other in zip(masks, launched, strict=True):
        assert mask is not None
        assert other is not None
        assert torch.equal(mask, other)
    registry = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS
    assert registry["sdpa"] is masking_utils.sdpa_mask, "other code finds transformers as it was"


@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_a_decoder_needs_no_mask_while_a_step_is_recorded(model, monkeypatch, masks):
    decoder = small_model(model).eval()
    ids = torch.arange(12).reshape(2, 6)
    decoder(ids, use_cache=False)
    assert masks == [None] * decoder.config.num_hidden_layers
    masks.clear()
    monkeypatch.setattr("transformers.utils.import_utils.is_cuda_stream_capturing", lambda: True)
    with one_text_per_row():
        decoder(ids, use_cache=False)
    assert masks == [None] * decoder.config.num_hidden_layers
    masks.clear()
    decoder(ids, use_cache=False)
    assert all(mask is not None for mask in masks), "transformers is as it was, and would have made one"


def test_a_context_of_masks_within_another_one_gives_back_what_it_found(masks):
    registry, decoder = masking_utils.ALL_MASK_ATTENTION_FUNCTIONS, small_model("gpt2").eval()
    ids = torch.arange(12).reshape(2, 6)
    with one_text_per_row():
        with unread_masks():
            decoder(ids, attention_mask=torch.ones_like(ids), use_cache=False)
        assert all(mask is not None for mask in masks)
        masks.clear()
        decoder(ids, use_cache=False)
        assert masks == [None] * decoder.config.num_hidden_layers
    assert registry["sdpa"] is masking_utils.sdpa_mask
