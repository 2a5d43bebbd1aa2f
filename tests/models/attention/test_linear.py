"""Linear attention: the recurrence that it stands for, masks, and what it cannot do."""

import pytest
import torch
from torch.nn import functional as F

import oelm
from oelm.evaluation.induction import measure_repetition
from oelm.models.attention.rotary import rotate
from tests.support.models import lively_model


def recurrent(attention, hidden, rotation):
    """Return the attention's output token by token, from a state per head that does not grow."""
    batch, tokens, _ = hidden.shape
    project = {name: getattr(attention, f"{name}_proj")(hidden) for name in ("q", "k", "v")}
    query, key, value = (
        project[name].view(batch, tokens, -1, attention.head_dim).transpose(1, 2) for name in ("q", "k", "v")
    )
    query, key = F.elu(query) + 1, F.elu(key) + 1
    above = (query, key) if rotation is None else (rotate(query, rotation), rotate(key, rotation))
    state = torch.zeros(*query.shape[:2], attention.head_dim, attention.head_dim, dtype=hidden.dtype)
    total = torch.zeros(*query.shape[:2], attention.head_dim, dtype=hidden.dtype)
    out = []
    for token in range(tokens):
        state = state + above[1][:, :, token, :, None] * value[:, :, token, None, :]
        total = total + key[:, :, token]
        read = (above[0][:, :, token, None] @ state)[:, :, 0]
        out.append(read / (query[:, :, token] * total).sum(-1, keepdim=True))
    return attention.o_proj(torch.stack(out, 1).flatten(2))


@pytest.mark.parametrize("positions", ["learned", "rotary", "none"])
def test_it_is_the_recurrence_with_a_state_of_constant_size(positions):
    model = lively_model("oelm-gpt", scores="linear", positions=positions).double()
    seen = {}
    attention = model.transformer.h[1].attn
    attention.register_forward_hook(
        lambda module, arguments, options, output: seen.update(options, hidden=arguments[0], out=output[0]),
        with_kwargs=True,
    )
    ids = torch.randint(3, 96, (2, 17), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(ids, use_cache=False)
        expected = recurrent(attention, seen["hidden"], seen["places"].rotation)
    torch.testing.assert_close(seen["out"], expected, atol=1e-11, rtol=1e-9)


def test_it_generates_with_its_cache_and_trains_with_frozen_queries_and_keys():
    model = lively_model("oelm-gpt", scores="linear", positions="rotary")
    oelm.apply(model, "oelm-freeze")
    ids = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
    greedy = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with_cache = model.generate(ids, use_cache=True, **greedy)
    assert torch.equal(with_cache, model.generate(ids, use_cache=False, **greedy))
    model(ids, labels=ids).loss.backward()
    assert model.transformer.h[0].attn.v_proj.weight.grad.abs().sum() > 0
    assert model.transformer.h[0].attn.q_proj.weight.grad is None
    oelm.verify(model)


def test_it_has_no_attention_weights_and_a_probe_says_so():
    row = measure_repetition(lively_model("oelm-gpt", scores="linear").eval(), blocks=2)[0]
    assert row.prefix_matching is None
    assert row.not_measured is not None
    assert row.not_measured.startswith("OelmGPTForCausalLM returns no attention weights")


def test_a_mask_of_another_kind_is_refused():
    attention = lively_model("oelm-gpt", scores="linear").transformer.h[0].attn
    with pytest.raises(ValueError, match=r"scores 'linear' .*'sdpa' or 'eager'"):
        attention(torch.zeros(1, 3, 48), mask=torch.ones(1, 3), places=_nowhere())


def _nowhere():
    from oelm.models.attention.rotary import TokenPlaces

    return TokenPlaces(rotation=None, rotary=None, predecessors=None, visible=None)
