"""Splitting and fusing projections is exact to the bit in every layout, and changes no output."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

import oelm
from oelm.method.families import Fused
from oelm.method.fused import fuse, unfuse
from oelm.method.projections import CoreProjection, SplitProjection
from oelm.method.sites import find_sites, weight_matrix
from tests.support.models import distance, lively_model, model_with_method

# Every fused layout: small model -> (kind of attention, the role of each head in the order of the output rows).
LAYOUTS = {
    "gpt2": ("decoder", "qqqq kkkk vvvv"),
    "gpt2-cross": ("cross", "kkkk vvvv"),
    "phi3": ("decoder", "qqqq kk vv"),
    "modernbert": ("encoder", "qqqq kkkk vvvv"),
    "gpt_neox": ("decoder", "qkv qkv qkv qkv"),
    "falcon-rw": ("decoder", "qkv qkv qkv qkv"),
    "falcon-7b": ("decoder", "qqqq k v"),
    "falcon-40b": ("decoder", "qqkv qqkv"),
}
layouts = pytest.mark.parametrize("name", LAYOUTS)


def _fused_site(model, name):
    site = next(site for site in find_sites(model)[1] if site.kind == LAYOUTS[name][0])
    return site, model.get_submodule(site.fused_path)


def test_every_fused_small_model_is_covered():
    from oelm.models.small import SMALL, small_model

    fused = {name for name in SMALL if any(site.fused for site in find_sites(small_model(name))[1])}
    assert fused == set(LAYOUTS)


@layouts
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fusing_the_unfused_parts_restores_the_projection(name, dtype):
    model = lively_model(name).to(dtype)
    site, module = _fused_site(model, name)
    fused_again = fuse(unfuse(module, site.fused, site.heads, site.kv_heads), site.heads)
    assert type(fused_again) is type(module)
    assert torch.equal(fused_again.weight, module.weight)
    assert torch.equal(fused_again.bias, module.bias) if module.bias is not None else fused_again.bias is None
    assert fused_again.weight.dtype is dtype


@layouts
def test_unfused_parts_hold_the_rows_of_their_role(name):
    model = lively_model(name)
    site, module = _fused_site(model, name)
    split = unfuse(module, site.fused, site.heads, site.kv_heads)
    order = LAYOUTS[name][1].replace(" ", "")
    heads = weight_matrix(module).split(site.d_head)
    assert len(heads) == len(order)
    for role in split.parts:
        rows = torch.cat([head for head, owner in zip(heads, order, strict=True) if owner == role])
        assert torch.equal(split.get_submodule(role).weight, rows)


@layouts
def test_split_projection_computes_what_the_fused_one_did(name):
    model = lively_model(name).double()
    site, module = _fused_site(model, name)
    split = unfuse(module, site.fused, site.heads, site.kv_heads)
    rng = torch.Generator().manual_seed(1)
    hidden = torch.randn(2, 5, site.width, generator=rng, dtype=torch.float64)
    assert distance(split(hidden), module(hidden)) < 1e-12


@layouts
def test_parts_have_separate_parameters(name):
    """Freezing one part leaves the others trainable, and changing one does not change the fused original."""
    model = lively_model(name)
    site, module = _fused_site(model, name)
    original = module.weight.detach().clone()
    split = unfuse(module, site.fused, site.heads, site.kv_heads)
    split.k.weight.requires_grad_(False)
    assert split.v.weight.requires_grad
    for first, second in itertools.combinations(split.parts, 2):
        first_weight, second_weight = split.get_submodule(first).weight, split.get_submodule(second).weight
        assert first_weight.untyped_storage().data_ptr() != second_weight.untyped_storage().data_ptr()
    split.v.weight.data.zero_()
    assert torch.equal(module.weight, original)


def test_unfused_parts_keep_requires_grad_of_the_fused_projection():
    model = lively_model("gpt2")
    site, module = _fused_site(model, "gpt2")
    module.weight.requires_grad_(False)
    split = unfuse(module, site.fused, site.heads, site.kv_heads)
    assert not split.v.weight.requires_grad
    assert split.v.bias.requires_grad


def test_only_plain_linears_are_unfused_and_fused():
    with pytest.raises(oelm.ModelError, match=r"qkv is a .*Bilinear, not a plain Linear"):
        unfuse(nn.Bilinear(4, 4, 12), Fused("qkv"), heads=2, kv_heads=2)
    with pytest.raises(oelm.ModelError, match="13 rows"):
        unfuse(nn.Linear(4, 13), Fused("qkv"), heads=2, kv_heads=2)
    split = model_with_method("gpt2", "oelm-exact").transformer.h[0].attn.c_attn
    assert isinstance(split, SplitProjection)
    assert isinstance(split.q, CoreProjection)
    with pytest.raises(oelm.ModelError, match="'q' is a CoreProjection"):
        fuse(split, heads=4)


def test_only_the_chosen_layers_are_unfused():
    model = model_with_method("gpt_neox", {"preset": "oelm-freeze", "layers": [1]})
    kinds = [isinstance(block.attention.query_key_value, SplitProjection) for block in model.gpt_neox.layers]
    assert kinds == [False, True, False]
