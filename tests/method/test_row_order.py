"""A fused projection whose rows are in another order than its registered family says: refused where it can be tried."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import BloomConfig, BloomForCausalLM, GPTBigCodeConfig, GPTBigCodeForCausalLM

import oelm
from oelm import FamilyError, Fused
from oelm.method import row_order
from oelm.method.families import _FAMILIES
from oelm.method.seal import record_of
from oelm.models.small import small_model
from tests.support.models import hashes

SIZES = {"n_layer": 2, "n_head": 4, "vocab_size": 99}
PATH = "self_attention.query_key_value"


@pytest.fixture
def register():
    """Return `register_family` for types that are forgotten afterwards."""
    types = []

    def call(model_type: str, **layout: Any) -> None:
        types.append(model_type)
        oelm.register_family(model_type, replace_existing=True, **layout)

    yield call
    for model_type in types:
        _FAMILIES.pop(model_type, None)


def register_bloom(register: Any, fused: Fused) -> None:
    paths = {"block": "h.*", "fused": fused, "o": "self_attention.dense"}
    register("bloom", kind="decoder", layers="n_layer", heads="n_head", **paths)


def bloom() -> BloomForCausalLM:
    return BloomForCausalLM(BloomConfig(hidden_size=64, **SIZES))


@pytest.mark.parametrize("layout", ["blocks", lambda config: "blocks"], ids=["name", "function"])
def test_the_wrong_order_is_refused_with_the_right_one(layout, register):
    """Its matrices would come out orthonormal, and hold rows of keys and values."""
    register_bloom(register, Fused(PATH, layout=layout))
    model = bloom()
    before = hashes(model, frozen=False)
    with pytest.raises(FamilyError, match=r"not in the order 'blocks'.*layout='groups'\) and replace_existing=True"):
        oelm.apply(model)
    assert hashes(model, frozen=False) == before
    assert record_of(model) is None
    register_bloom(register, Fused(PATH, layout="groups"))
    assert oelm.apply(model).frozen > 0


def test_a_family_that_is_shared_by_name_is_tried_too(register):
    model = small_model("gpt_neox")
    model.config.model_type = "own-type"
    register("own-type", family="gpt_neox")
    assert oelm.apply(model).frozen == oelm.apply(small_model("gpt_neox")).frozen
    stack = _FAMILIES["gpt_neox"].stacks[0]
    blocks = oelm.Stack(**{**vars(stack), "fused": Fused("attention.query_key_value")})
    register("own-type", family=oelm.Family((blocks,)))
    other = small_model("gpt_neox")
    other.config.model_type = "own-type"
    with pytest.raises(FamilyError, match="layout='groups'"):
        oelm.apply(other)


@pytest.mark.parametrize("layout", ["blocks", "groups"])
def test_one_key_for_all_heads_has_the_same_rows_in_either_order(layout, register):
    paths = {"block": "h.*", "fused": Fused("attn.c_attn", layout=layout), "o": "attn.c_proj"}
    heads = {"layers": "n_layer", "heads": "n_head", "kv_heads": lambda config: 1}
    register("gpt_bigcode", kind="decoder", **paths, **heads)
    assert oelm.apply(GPTBigCodeForCausalLM(GPTBigCodeConfig(n_embd=64, **SIZES))).frozen > 0


def test_what_cannot_be_tried_is_applied_as_it_is_registered(register, monkeypatch):
    monkeypatch.setattr(row_order, "_LARGEST_TRIAL", 1000)
    register_bloom(register, Fused(PATH, layout="blocks"))
    assert oelm.apply(bloom()).frozen > 0
