"""The kernels that the forms of attention are measured against compute what SDPA computes."""

from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from oelm.bench import decode_kernels
from oelm.bench.caches import FLOAT8
from oelm.models.gpt import OelmGPTForCausalLM
from oelm.models.gpt_config import gpt_config
from tests.support.interpreter import error_in_the_interpreter

# batch, heads, key-value heads, places, filled places, dimensions of a key and of a value
SHAPES = [
    (2, 8, 8, 300, 290, 64, 64),
    (2, 8, 1, 300, 300, 64, 64),
    (1, 6, 3, 1000, 5, 16, 64),
    (3, 4, 2, 130, 129, 48, 40),
]


def tensors(shape, dtype=torch.float32, device="cpu"):
    """Return a query, and keys and values whose places beyond the filled ones would change the result."""
    batch, heads, kv_heads, places, filled, d_key, d_value = shape
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, heads, 1, d_key, generator=generator).to(device, dtype)
    key = torch.randn(batch, kv_heads, places, d_key, generator=generator).to(device, dtype)
    value = torch.randn(batch, places, kv_heads, d_value, generator=generator).to(device, dtype).transpose(1, 2)
    key[:, :, filled:], value[:, :, filled:] = 9.0, 99.0
    return query, key, value, torch.tensor(filled, device=device)


def expected(query, key, value, filled):
    key, value = key[:, :, :filled], value[:, :, :filled]
    return F.scaled_dot_product_attention(query, key, value, scale=0.2, enable_gqa=True)


def to_bytes(key, value, filled):
    """Return keys and values as bytes of 8-bit floats, their scales, and what these stand for."""
    scales = torch.stack([states[:, :, :filled].float().abs().amax((0, 2, 3)) / 448 for states in (key, value)])
    stored = [
        (states.float() / scale[:, None, None]).to(FLOAT8) for states, scale in zip((key, value), scales, strict=True)
    ]
    meant = [states.float() * scale[:, None, None] for states, scale in zip(stored, scales, strict=True)]
    return [states.view(torch.uint8) for states in stored], scales, meant


def compare_kernel(dtype, device) -> float:
    """Return the kernel's largest distance from SDPA in float32, over all shapes, tiles and ways to store a number."""
    from oelm.bench.split_kernel import TILES, CachedPairs, attend_in_parts

    largest = 0.0
    for shape in SHAPES:
        query, key, value, filled = tensors(shape, dtype, device)
        stored, scales, meant = to_bytes(key, value, filled)
        for tile in TILES:
            plain = attend_in_parts(query, CachedPairs(key, value, filled), 0.2, tile)
            small = attend_in_parts(query, CachedPairs(*stored, filled, scales), 0.2, tile)
            for out, pair in ((plain, (key.float(), value.float())), (small, meant)):
                exact = expected(query.float(), *pair, filled)[:, :, 0]
                largest = max(largest, (out.float() - exact).abs().max().item())
    return largest


@pytest.mark.full
def test_the_kernel_in_tritons_interpreter():
    assert error_in_the_interpreter(__name__, "compare_kernel(torch.float16, 'cpu')") < 5e-3


def test_the_compiler_traces_the_kernel_without_a_graph_break(monkeypatch):
    """Only tracing is checked, which needs no GPU."""
    pytest.importorskip("triton")
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    from oelm.bench.split_kernel import CachedPairs, attend_in_parts

    query, key, value, filled = tensors(SHAPES[0], torch.bfloat16)
    graphs = []

    def record_graph(graph, inputs):
        graphs.append(graph.code)
        return lambda *tensors: (torch.zeros(1),)

    def one_token(query, key, value):
        return attend_in_parts(query, CachedPairs(key, value, filled), 0.125, 64)

    torch.compile(one_token, backend=record_graph, fullgraph=True, dynamic=False)(query, key, value)
    assert graphs[0].count("triton_kernel_wrapper_mutation(") == 2


@pytest.mark.parametrize("stored", ["bf16", "u8"])
@pytest.mark.parametrize("tile", [64, 128])
def test_the_kernel_compiles_for_a_gpu_without_one(stored, tile):
    """Tiles must be on their way from memory while others are computed, and nothing may be in double precision."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from oelm.bench.split_kernel import TILES, _attend_part

    fixed = {"SCALING": 0.18, "KV_HEADS": 8, "GROUP": 1, "ROWS": 16, "TILE": tile, "FLOAT8": stored == "u8"}
    fixed |= {"D_KEY": 64, "WIDE_KEY": 64, "D_VALUE": 64, "WIDE_VALUE": 64, "key_by_dim": 1, "value_by_dim": 1}
    types = {"query": "*bf16", "key": f"*{stored}", "value": f"*{stored}", "length": "*i64", "scales": "*fp32"}
    types |= {"sums": "*fp32", "tops": "*fp32"} | dict.fromkeys(fixed, "constexpr")
    names = _attend_part.arg_names
    aligned = {(index,): [["tt.divisibility", 16]] for index, name in enumerate(names) if name not in fixed}
    source = ASTSource(_attend_part, {name: types.get(name, "i32") for name in names}, constexprs=fixed, attrs=aligned)
    ptx = compile(source, target=GPUTarget("cuda", 90, 32), options=TILES[tile]).asm["ptx"]
    assert "cp.async.cg" in ptx
    assert ".f64" not in ptx


@pytest.mark.gpu
def test_the_kernel_on_a_gpu():
    assert compare_kernel(torch.bfloat16, "cuda") < 3e-2


@pytest.mark.parametrize("shape", SHAPES)
def test_a_registered_function_attends_to_the_filled_places_on_a_cpu(shape):
    query, key, value, filled = tensors(shape)
    module = SimpleNamespace(num_key_value_groups=shape[1] // shape[2], layer_idx=1)
    attend = ALL_ATTENTION_FUNCTIONS["oelm_in_parts_64"]
    out, _ = attend(module, query, key, value, filled, scaling=0.2, dropout=0.0)
    assert torch.allclose(out.transpose(1, 2), expected(query, key, value, filled), atol=1e-5)
    stored, scales, meant = to_bytes(key, value, filled)
    scales_of_layers = torch.stack([torch.zeros_like(scales), scales])
    out, _ = attend(module, query, *stored, filled, scaling=0.2, cache_scales=scales_of_layers)
    assert torch.allclose(out.transpose(1, 2), expected(query, *meant, filled), atol=1e-5)


def test_the_function_without_a_mask_attends_to_every_place():
    query, key, value, _ = tensors(SHAPES[0])
    out, _ = ALL_ATTENTION_FUNCTIONS["oelm_unmasked"](
        SimpleNamespace(num_key_value_groups=1), query, key, value, None, scaling=0.2, dropout=0.0
    )
    assert torch.allclose(out.transpose(1, 2), expected(query, key, value, key.shape[2]), atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "dtype", "expected_names"),
    [
        ({}, torch.bfloat16, ["sdpa", "flash", "cudnn"]),
        ({"num_key_value_heads": 1}, torch.bfloat16, ["sdpa", "flash", "cudnn"]),
        ({}, torch.float32, []),
        ({"latent": 128, "channel": 32}, torch.bfloat16, []),
    ],
)
def test_which_kernels_are_tried_on_a_gpu(fields, dtype, expected_names):
    model = OelmGPTForCausalLM(gpt_config("tiny", vocab_size=64, num_hidden_layers=1, **fields)).to(dtype)
    names = [kernel.name for kernel in decode_kernels.kernels_for(model, torch.device("cuda"), float8_cache=False)]
    assert [name for name in names if not name.startswith("split")] == expected_names
    in_parts = [kernel.name for kernel in decode_kernels.kernels_for(model, torch.device("cuda"), float8_cache=True)]
    assert in_parts == ["split-64", "split-128"]
    assert decode_kernels.kernels_for(model, torch.device("cpu"), float8_cache=False) == []


def test_a_kernel_is_the_models_only_while_it_is_chosen():
    model = OelmGPTForCausalLM(gpt_config("tiny", vocab_size=64, num_hidden_layers=1))
    kernel = decode_kernels.DecodeKernel("split-64", "oelm_in_parts_64")
    with kernel.chosen(model):
        assert model.transformer.h[0].attn.config._attn_implementation == "oelm_in_parts_64"
    assert model.config._attn_implementation == "sdpa"
