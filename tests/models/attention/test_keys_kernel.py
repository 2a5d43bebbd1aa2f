"""One new token's attention over cached keys that are values too: the GPU kernel gives what torch gives."""

import pytest
import torch
import torch.nn.functional as F

from oelm.models.attention.rotary import OelmGPTRotary, rotate
from oelm.models.attention.visible import Visible
from oelm.models.gpt import OelmGPTForCausalLM
from oelm.models.gpt_config import gpt_config
from tests.support.interpreter import error_in_the_interpreter
from tests.support.visible import readings

# Query heads, key heads, dimensions of a head, texts, tokens.
SHAPES = [(4, 4, 32, 2, 100), (4, 2, 64, 3, 33), (1, 1, 32, 1, 300), (20, 1, 32, 2, 1), (8, 8, 64, 1, 700)]


def inputs(shape, dtype, device="cpu"):
    """Return a query, keys that are a slice of a longer cache, rotations or None, and masks of every kind."""
    heads, kv_heads, d, batch, tokens = shape
    generator = torch.Generator().manual_seed(0)

    def random(*sizes):
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    keys = random(batch, tokens + 5, kv_heads * d)[:, :tokens]
    turned = OelmGPTRotary(d, 10_000.0).to(device)(torch.arange(tokens, device=device)[None], dtype)
    visible = torch.rand(batch, 1, 1, tokens + 3, generator=generator).to(device) > 0.3
    visible[..., 0] = True
    in_a_row = (torch.arange(tokens + 3, device=device) >= tokens // 3).expand_as(visible)
    one_text_hidden = visible.clone()
    one_text_hidden[0] = False
    masks = (None, visible, in_a_row, one_text_hidden, 3 * random(*visible.shape))
    return random(batch, heads, d), keys, (turned, None), masks


def by_torch(query, keys, rotation, mask, scaling):
    """Return the same attention in float32, with a score as low as float32 has for hidden tokens."""
    query, keys = query.float()[:, :, None], keys.float().view(*keys.shape[:2], -1, query.shape[-1]).transpose(1, 2)
    keys = keys.repeat_interleave(query.shape[1] // keys.shape[1], dim=1)
    rotated = keys if rotation is None else rotate(keys, tuple(part.float() for part in rotation))
    scores = query @ rotated.mT * scaling
    if mask is not None:
        mask = mask[..., : keys.shape[2]]
        # Not by torch's own attention: on a GPU it gives zeros for a text with every token hidden.
        lowest = torch.finfo(torch.float32).min
        scores = scores.masked_fill(~mask, lowest) if mask.dtype == torch.bool else scores + mask.float()
    return (F.softmax(scores, dim=-1) @ keys)[:, :, 0]


def largest_error(attend, dtype, device="cpu") -> float:
    errors = []
    for shape in SHAPES:
        query, keys, rotations, masks = inputs(shape, dtype, device)
        for rotation in rotations:
            for mask in masks:
                expected = by_torch(query, keys, rotation, mask, 0.2)
                for visible in readings(mask):
                    out = attend(query, keys, rotation, visible, 0.2)
                    errors.append((out.float() - expected).abs().max().item())
    return max(errors)


def largest_error_in_the_interpreter() -> float:
    from oelm.models.attention.keys_kernel import attend_on_gpu

    return largest_error(attend_on_gpu, torch.float16)


@pytest.mark.full
def test_the_kernel_in_tritons_interpreter():
    assert error_in_the_interpreter(__name__, "largest_error_in_the_interpreter()") < 5e-3


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_compiler_traces_the_kernel_without_a_graph_break(monkeypatch, dynamic):
    """Only tracing is checked, which needs no GPU."""
    pytest.importorskip("triton")
    from oelm.models.attention.keys_kernel import attend_on_gpu

    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    graphs = []

    def record_graph(graph, inputs):
        graphs.append(graph.code)
        return lambda *tensors: (torch.zeros(1),)

    torch.compiler.reset()
    compiled = torch.compile(attend_on_gpu, backend=record_graph, fullgraph=True, dynamic=dynamic)
    for tokens in (100, 1500):
        query, keys, (rotation, _), (_, mask, *_) = inputs((8, 8, 64, 2, tokens), torch.bfloat16)
        compiled(query, keys, rotation, Visible.of(mask), 0.125)
    assert [graph.count("triton_kernel_wrapper_mutation(") for graph in graphs] == [2] * (1 if dynamic else 2)


@pytest.mark.sample(2)
@pytest.mark.parametrize("architecture", [80, 90])
@pytest.mark.parametrize("mask", ["none", "range", "boolean", "additive"])
def test_the_kernel_compiles_and_loads_keys_ahead(architecture, mask):
    pytest.importorskip("triton")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from oelm.models.attention.keys_kernel import _STAGES, _TILE, _WARPS, _attend_part

    names = _attend_part.arg_names
    fixed = {"KV_HEADS": 8, "GROUP": 1, "ROWS": 16, "HALF": 32, "TILE": _TILE, "ROTATED": True, "MASK": mask}
    types = dict.fromkeys(("query", "keys", "cosines", "sines"), "*bf16") | {"factor": "fp64"}
    types |= {"mask": "*i1" if mask == "boolean" else "*bf16", "sums": "*fp32", "tops": "*fp32", "ranges": "*i32"}
    types |= dict.fromkeys(fixed, "constexpr")
    unaligned = {"factor", "tokens", "mask_by_text", "mask_by_token", "ranges_by_text", *fixed}
    aligned = [name for name in names if name not in unaligned]
    source = ASTSource(
        _attend_part,
        {name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": _WARPS, "num_stages": _STAGES}
    built = compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    assert built.metadata.shared < 101_376, "two programs fit on a multiprocessor of Hopper, one on any since Ampere"
    assert "cp.async" in built.asm["ptx"], "tiles are loaded while others are used"
    assert "mul.f64" not in built.asm["ptx"], "scores in double precision are slow"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_on_a_gpu(dtype):
    from oelm.models.attention.keys_kernel import attend_on_gpu

    assert largest_error(attend_on_gpu, dtype, "cuda") < 5e-2


@pytest.mark.gpu
@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("fields", [{}, {"num_key_value_heads": 2}, {"positions": "learned"}])
def test_generation_uses_the_kernel(monkeypatch, fields, cache):
    """Its logits are those of eager attention, which rotates the whole cache, up to rounding."""
    from oelm.models.attention import keys_kernel

    calls, attend = [], keys_kernel.attend_on_gpu

    def count(*arguments):
        calls.append(arguments[0].shape)
        return attend(*arguments)

    monkeypatch.setattr(keys_kernel, "attend_on_gpu", count)
    torch.manual_seed(0)
    config = gpt_config("modern-tiny", vocab_size=96, num_hidden_layers=2, shared_kv=True, **fields)
    model = OelmGPTForCausalLM(config).to("cuda", torch.bfloat16).eval()
    ids = torch.randint(96, (2, 30), device="cuda")
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    # Compiled code would not call the function that counts.
    options = {"do_sample": False, "max_new_tokens": 6, "output_logits": True, "return_dict_in_generate": True}
    options |= {"pad_token_id": 0, "disable_compile": True, "cache_implementation": cache}
    found = model.generate(ids, attention_mask=mask, **options)
    assert len(calls) == 2 * 5, "two layers, five tokens after the prompt's"
    model.set_attn_implementation("eager")
    whole = F.pad(mask, (0, 5), value=1)
    positions = (whole.cumsum(-1) - 1).clamp(min=0)
    eager = model(found.sequences[:, :-1], attention_mask=whole, position_ids=positions).logits[:, -6:].float()
    assert (torch.stack(found.logits, 1).float() - eager).abs().max() < 5e-2
    assert len(calls) == 2 * 5, "eager attention has no kernel"
