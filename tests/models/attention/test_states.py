"""One new token's attention over cached states equals attention over values computed from each state."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F

from oelm.models.attention.states import _has_shared_memory, can_fuse, mix_states, mix_states_fused

SHAPES = [(2, 8, 100, 64), (3, 4, 33, 32), (1, 6, 300, 64), (4, 3, 5, 16), (2, 12, 40, 64)]


def tensors(shape, dtype=torch.float32, device="cpu"):
    """Return a query, states that are a slice of a longer cache, and a mask of every kind."""
    batch, heads, tokens, d_head = shape
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(batch, heads, 1, d_head, generator=generator).to(device, dtype)
    states = torch.randn(batch, heads, tokens + 7, d_head, generator=generator).to(device, dtype)[:, :, :tokens]
    visible = torch.rand(batch, 1, 1, tokens + 3, generator=generator).to(device) > 0.3
    visible[..., 0] = True
    additive = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill(~visible, torch.finfo(dtype).min)
    return query, states, (None, visible, visible[:1], additive)


@pytest.mark.parametrize("shape", SHAPES)
def test_projecting_the_mixture_equals_attending_to_projected_states(shape):
    query, states, masks = tensors(shape)
    _, heads, tokens, d_head = shape
    width = heads * d_head
    matrix = torch.randn(width, width, generator=torch.Generator().manual_seed(1))
    values = (states.transpose(1, 2).flatten(-2) @ matrix.T).unflatten(-1, (heads, d_head)).transpose(1, 2)
    for mask in masks:
        exact_mask = None if mask is None else mask[..., :tokens]
        expected = F.scaled_dot_product_attention(query, states, values, attn_mask=exact_mask).squeeze(2)
        mixed, weights = mix_states(query, states, mask, d_head**-0.5)
        out = torch.einsum("bhw,hew->bhe", mixed, matrix.unflatten(0, (heads, d_head)))
        assert torch.allclose(out, expected, atol=1e-3)
        assert torch.allclose(weights.sum(-1), torch.ones(()))


def compare_kernel(dtype, device, fused) -> float:
    """Return the kernel's largest distance from the mixture in float32, over all shapes and masks."""
    largest = 0.0
    for shape in SHAPES:
        query, states, masks = tensors(shape, dtype, device)
        for mask in masks:
            mask32 = mask if mask is None or mask.dtype == torch.bool else mask.float()
            expected, _ = mix_states(query.float(), states.float(), mask32, shape[-1] ** -0.5)
            mixed = fused(query, states, mask, shape[-1] ** -0.5)
            largest = max(largest, (mixed.float() - expected).abs().max().item())
    return largest


def test_the_kernel_in_tritons_interpreter():
    """numpy runs the kernel line by line, which checks its arithmetic without a GPU."""
    pytest.importorskip("triton")
    code = (
        "import torch; from oelm.models.attention.states_kernel import mix_on_gpu;"
        "from tests.models.attention.test_states import compare_kernel;"
        "largest = compare_kernel(torch.float16, 'cpu', mix_on_gpu); print(largest);"
        "raise SystemExit(not largest < 5e-3)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "TRITON_INTERPRET": "1"}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_compiler_traces_the_kernel_without_a_graph_break(monkeypatch):
    """Only tracing is checked, which needs no GPU. A graph break would end the recorded graph of a token."""
    pytest.importorskip("triton")
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr("oelm.models.attention.states._query_shared_memory", lambda *arguments: True)
    query, states, (_, mask, *_) = tensors(SHAPES[0], torch.bfloat16)
    graphs = []

    def record_graph(graph, inputs):
        graphs.append(graph.code)
        return lambda *tensors: (torch.zeros(1),)

    def one_token(query, states):
        return mix_states_fused(query, states, mask, 0.125) if _has_shared_memory(0, 8, 64) else query

    torch.compile(one_token, backend=record_graph, fullgraph=True, dynamic=False)(query, states)
    assert graphs[0].count("triton_kernel_wrapper_mutation(") == 2


@pytest.mark.parametrize("scaling", ["fp32", "fp64"])
@pytest.mark.parametrize("mask", ["none", "boolean", "additive"])
def test_the_kernel_compiles_for_a_gpu_without_one(scaling, mask):
    """Launched from Python, the scaling is a float; launched from a compiled model, it is a double."""
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from oelm.models.attention.states_kernel import _LAUNCH, _mix_part

    fixed = {"HEADS": 8, "D_HEAD": 64, "ROWS": 16, "TILE": 32, "MASK": mask, "WIDTH": 512, "WIDE": 512}
    types = {"query": "*bf16", "states": "*bf16", "mask": "*i1" if mask == "boolean" else "*bf16", "sums": "*fp32"}
    types |= {"tops": "*fp32", "scaling": scaling} | dict.fromkeys(fixed, "constexpr")
    source = ASTSource(_mix_part, {name: types.get(name, "i32") for name in _mix_part.arg_names}, constexprs=fixed)
    built = compile(source, target=GPUTarget("cuda", 90, 32), options=_LAUNCH)
    assert "mul.f64" not in built.asm["ptx"], "scores in double precision are slow"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_on_a_gpu(dtype):
    query, states, _ = tensors(SHAPES[0], dtype, "cuda")
    assert can_fuse(query, states)
    assert compare_kernel(dtype, "cuda", mix_states_fused) < 3e-2


def test_tensors_on_the_cpu_do_not_use_the_kernel():
    query, states, _ = tensors(SHAPES[0], torch.bfloat16)
    assert not can_fuse(query, states)
