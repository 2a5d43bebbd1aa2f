"""One new token's attention over cached latents equals attention over keys and values computed from each latent."""

import warnings
from dataclasses import astuple
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from oelm.models.attention import latent_decode
from oelm.models.attention.latent_decode import LatentCache, LatentQuery, read_latents
from oelm.models.attention.latent_launch import Device, Launch, choose_launch, launch_options, shared_bytes
from tests.support.interpreter import error_in_the_interpreter
from tests.support.visible import readings

H200 = Device(major=9, multiprocessors=132, shared_bytes=232_448)
A5000 = Device(major=8, multiprocessors=64, shared_bytes=101_376)
# Width of the latent, width of the channel, heads, texts, tokens.
SHAPES = [(64, 16, 4, 2, 100), (48, None, 6, 3, 33), (96, 32, 12, 1, 300), (16, 64, 1, 5, 1), (128, None, 8, 2, 65)]


def tensors(shape, dtype=torch.float64, device="cpu"):
    """Return queries, a cache that is a slice of a longer one, and a mask of every kind."""
    r, p, heads, batch, tokens = shape
    generator = torch.Generator().manual_seed(0)

    def random(*sizes):
        return torch.randn(*sizes, generator=generator).to(device, dtype)

    query = LatentQuery(random(heads, batch, r).transpose(0, 1), None if p is None else random(batch, heads, p))
    rows = random(batch, tokens + 7, r + (p or 0))[:, :tokens]
    cache = LatentCache(rows[..., :r], None if p is None else rows[..., r:])
    visible = torch.rand(batch, 1, 1, tokens + 3, generator=generator).to(device) > 0.3
    visible[..., 0] = True
    lowest = torch.zeros(visible.shape, dtype=dtype, device=device).masked_fill(~visible, torch.finfo(dtype).min)
    infinite = torch.zeros(visible.shape, device=device).masked_fill(~visible, float("-inf"))
    # Padding before and after every text, as in a preallocated cache.
    position = torch.arange(tokens + 3, device=device)
    first = torch.arange(batch, device=device)[:, None, None, None].add(tokens // 3).clamp(max=tokens - 1)
    in_a_row = (position >= first) & (position < (first + 1).clamp(min=tokens - 2 * tokens // 5))
    return query, cache, (None, visible, visible[:1], lowest, infinite, 3 * random(*visible.shape), in_a_row)


def mix(query, cache, mask, scaling, **options):
    """Return the mixture of latents itself, and the weights: every head's value is the latent."""
    heads, r = query.content.shape[1], cache.latent.shape[-1]
    whole = torch.eye(r, dtype=cache.latent.dtype, device=cache.latent.device).expand(heads, r, r)
    return read_latents(query, cache, whole, mask, scaling, **options)


def expanded_attention(query, cache, mask, up, down):
    """Return attention with every head's keys (up @ latent, channel) and values (down @ latent), by torch."""
    keys, values = (torch.einsum("hdr,btr->bhtd", matrix, cache.latent) for matrix in (up, down))
    if cache.channel is not None:
        keys = torch.cat([keys, cache.channel[:, None].expand(-1, keys.shape[1], -1, -1)], dim=-1)
    mask = None if mask is None else mask[..., : keys.shape[2]]
    if mask is not None and mask.dtype != torch.bool:
        mask = mask.to(query.dtype)
    return F.scaled_dot_product_attention(query[:, :, None], keys, values, attn_mask=mask, scale=0.2).squeeze(2)


@pytest.mark.parametrize("shape", SHAPES)
def test_reading_latents_equals_attention_over_keys_and_values(shape):
    r, _, heads, batch, _ = shape
    query, cache, masks = tensors(shape)
    up, down = torch.randn(2, heads, 24, r, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) / r**0.5
    plain = torch.randn(batch, heads, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    plain.requires_grad_()
    for mask in masks:
        content = torch.einsum("hdr,bhd->bhr", up, plain)
        whole = plain if query.channel is None else torch.cat([plain, query.channel], dim=-1)
        expected = expanded_attention(whole, cache, mask, up, down)
        out, weights = read_latents(LatentQuery(content, query.channel), cache, down, mask, 0.2)
        assert (out - expected).abs().max() < 1e-12
        assert (weights.sum(-1) - 1).abs().max() < 1e-12
        gradient, expected_gradient = (torch.autograd.grad(each.pow(2).sum(), plain)[0] for each in (out, expected))
        assert (gradient - expected_gradient).abs().max() < 1e-12


def sliced(query):
    """Return a query of which each head reads only its slice of the latent, and the same one with zeros elsewhere."""
    heads, r = query.content.shape[1:]
    content = query.content[..., : r // heads]
    spread = torch.eye(heads, dtype=content.dtype, device=content.device)[:, :, None] * content[:, :, None]
    return LatentQuery(content, query.channel), LatentQuery(spread.flatten(2), query.channel)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_head_may_read_its_slice_of_the_latent(shape):
    query, cache, masks = tensors(shape)
    of_slices, spread = sliced(query)
    for mask in masks:
        for got, expected in zip(mix(of_slices, cache, mask, 0.2), mix(spread, cache, mask, 0.2), strict=True):
            assert (got - expected).abs().max() < 1e-12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_text_with_every_token_hidden_gets_equal_weights(dtype):
    query, cache, (_, visible, _, _, infinite, *_) = tensors(SHAPES[0], dtype)
    visible[0], infinite[0] = False, float("-inf")
    for mask in (visible, infinite):
        mixed, weights = mix(query, cache, mask, 0.2)
        assert weights.shape == (2, 4, 1, 100)
        assert torch.allclose(weights[0].float(), torch.tensor(0.01), rtol=1e-2)
        assert mixed.dtype == dtype
        assert mixed.isfinite().all()


def test_a_channel_on_one_side_alone_is_refused():
    query, cache, _ = tensors(SHAPES[0])
    with pytest.raises(ValueError, match="only the cache has a rotary channel"):
        mix(LatentQuery(query.content), cache, None, 0.2)


# The launch, which needs no GPU to be computed.


@pytest.mark.parametrize(("batch", "tokens", "parts"), [(256, 4096, 1), (8, 16384, 16), (1, 65536, 132), (64, 100, 1)])
def test_parts_of_texts_fill_the_gpu(batch, tokens, parts):
    assert launch_options(512, 32, batch, tokens, H200) == (Launch(64, 4, 3, True), parts)


@pytest.mark.parametrize("batch", [3, 50, 100, 140, 200, 1000])
def test_few_multiprocessors_are_idle_in_the_last_round(batch):
    _, parts = launch_options(512, 32, batch, 10**6, H200)
    rounds = -(-batch * parts // H200.multiprocessors)
    assert batch * parts / (rounds * H200.multiprocessors) > 0.8


@pytest.fixture
def gpu_without_cuda(monkeypatch):
    """Give torch an A5000's properties."""
    properties = SimpleNamespace(name="A5000", major=8, multi_processor_count=64, shared_memory_per_block_optin=101_376)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(latent_decode, "find_spec", lambda name: object())
    latent_decode._query_gpu.cache_clear()
    yield properties
    latent_decode._query_gpu.cache_clear()


def test_a_width_that_does_not_fit_is_said_once(gpu_without_cuda, monkeypatch):
    assert latent_decode._query_gpu(0, 512, 32) == A5000
    with pytest.warns(UserWarning, match=r"width 4,096 \+ 32 .* needs 264,704 bytes .* A5000 has 101,376"):
        assert latent_decode._query_gpu(0, 4096, 32) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latent_decode._query_gpu(0, 4096, 32) is None
    monkeypatch.setattr(latent_decode, "find_spec", lambda name: None)
    with pytest.warns(UserWarning, match="triton is not installed"):
        latent_decode._query_gpu(0, 512, 64)


# The kernel.


def largest_error(read, dtype, device, shapes=SHAPES) -> float:
    """Return the largest distance of `read` from what torch computes in float32, over shapes, queries and masks."""

    def in_float32(tensor):
        return None if tensor is None else tensor.float()

    largest = 0.0
    for shape in shapes:
        whole, cache, masks = tensors(shape, dtype, device)
        one_text_hidden = masks[1].clone()
        one_text_hidden[0] = False
        # As GPT-2 stores its values: a head's columns lie apart.
        values = torch.randn(shape[0], shape[2], 40, generator=torch.Generator().manual_seed(1)).to(device, dtype)
        values = values.permute(1, 2, 0) / shape[0] ** 0.5
        exact_cache = LatentCache(in_float32(cache.latent), in_float32(cache.channel))
        for query in (whole, sliced(whole)[0]) if shape[0] % shape[2] == 0 else (whole,):
            exact_query = LatentQuery(in_float32(query.content), in_float32(query.channel))
            for mask in (*masks, one_text_hidden):
                exact_mask = mask if mask is None or mask.dtype == torch.bool else mask.float()
                expected, _ = read_latents(exact_query, exact_cache, values.float(), exact_mask, 0.2, fused=False)
                largest = max(largest, (read(query, cache, values, mask, 0.2).float() - expected).abs().max().item())
    return largest


def largest_error_in_the_interpreter() -> float:
    """Return the kernel's largest error on the CPU, with products of both layouts and with one part or several."""
    from oelm.models.attention import latent_kernel

    errors = []
    for number, shape in enumerate([*SHAPES, (40, 8, 20, 2, 20), (48, 24, 4, 2, 200), (64, 32, 8, 2, 70)]):
        gpu, parts = (H200, A5000)[number % 2], (1, 3, 70)[number % 3]
        options = choose_launch(shape[0], shape[1] or 0, gpu), parts
        latent_kernel.launch_options = lambda *sizes, options=options: options

        def read(query, cache, values, mask, scaling, gpu=gpu):
            parts = (query.content, query.channel), (cache.latent, cache.channel)
            outs = [latent_kernel.read_on_gpu(*parts, values, visible, scaling, gpu) for visible in readings(mask)]
            assert all(torch.equal(out, outs[0]) for out in outs), "a range says what its mask says"
            return outs[0]

        errors.append(largest_error(read, torch.float16, "cpu", [shape]))
    return max(errors)


@pytest.mark.full
def test_the_kernel_in_tritons_interpreter():
    assert error_in_the_interpreter(__name__, "largest_error_in_the_interpreter()") < 5e-3


@pytest.mark.parametrize(("lengths", "kernels"), [((100, 150), 1), ((1024, 1500), 2)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_the_compiler_traces_the_kernel_without_a_graph_break(monkeypatch, dynamic, lengths, kernels):
    """Only tracing is checked, which needs no GPU. A graph break would end the recorded graph of a token."""
    pytest.importorskip("triton")
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    monkeypatch.setattr(latent_decode, "_is_for_kernel", lambda *inputs: True)
    monkeypatch.setattr(latent_decode, "_query_gpu", lambda *arguments: H200)
    graphs = []

    def record_graph(graph, inputs):
        graphs.append(graph.code)
        return lambda *tensors: (torch.zeros(1),)

    def one_token(content, channel, latent, rotary, mask):
        return mix(LatentQuery(content, channel), LatentCache(latent, rotary), mask, 0.125)[0]

    torch.compiler.reset()  # other tests have compiled the same function
    compiled = torch.compile(one_token, backend=record_graph, fullgraph=True, dynamic=dynamic)
    for tokens in lengths:
        query, cache, (_, mask, *_) = tensors((512, 32, 8, 2, tokens), torch.bfloat16)
        compiled(query.content, query.channel, cache.latent, cache.channel, mask)
    assert [graph.count("triton_kernel_wrapper_mutation(") for graph in graphs] == [kernels] * (1 if dynamic else 2)


def built_for_hopper(r, p, launch, mask="none", scaling="fp32"):
    """Return the kernel compiled for an H200, as Triton compiles it for aligned tensors."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    from oelm.models.attention.latent_kernel import _mix_part
    from oelm.models.attention.latent_launch import HEADS_AT_ONCE, padded_columns

    names = _mix_part.arg_names
    fixed = dict(zip(("WIDE", "REST", "CHANNEL"), padded_columns(r, p), strict=True))
    fixed |= {"HEADS": 8, "R": r, "P": p, "ROWS": HEADS_AT_ONCE, "TILE": launch.tile, "TURNED": launch.turned}
    fixed |= {"MASK": mask, "WHOLE": False, "SLICED": False}
    types = dict.fromkeys(("content", "rotary", "latent", "channel", "mask"), "*bf16") | {"factor": scaling}
    types |= dict.fromkeys(("sums", "tops"), "*fp32") | dict.fromkeys(fixed, "constexpr")
    types |= {"ranges": "*i32"} | ({"mask": "*i1"} if mask == "boolean" else {})
    unaligned = {"factor", "tokens", "mask_by_text", "mask_by_token", "ranges_by_text", *fixed}
    aligned = [name for name in names if name not in unaligned]
    source = ASTSource(
        _mix_part,
        {name: types.get(name, "i32") for name in names},
        constexprs={(names.index(name),): value for name, value in fixed.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    options = {"num_warps": launch.warps, "num_stages": launch.stages}
    return compile(source, target=GPUTarget("cuda", 90, 32), options=options)


@pytest.mark.sample(2)
@pytest.mark.parametrize("widths", [(512, 32), (512, 0), (256, 32), (128, 32), (768, 32), (1024, 64), (2048, 64)])
def test_the_compiled_kernel_needs_the_shared_memory_that_was_computed(widths):
    pytest.importorskip("triton")
    launch = choose_launch(*widths, H200)
    built = built_for_hopper(*widths, launch)
    assert built.metadata.shared == shared_bytes(launch, *widths) <= H200.shared_bytes
    assert "cp.async" in built.asm["ptx"], "tiles are loaded while others are used"
    assert ("wgmma" in built.asm["ptx"]) == launch.turned


@pytest.mark.sample(2)
@pytest.mark.parametrize("scaling", ["fp32", "fp64"])
@pytest.mark.parametrize("mask", ["none", "range", "boolean", "additive"])
def test_the_kernel_compiles_for_every_mask(scaling, mask):
    """Launched from Python, the scaling is a float; launched from a compiled model, it is a double."""
    pytest.importorskip("triton")
    built = built_for_hopper(256, 32, Launch(64, 4, 3, True), mask, scaling)
    assert "mul.f64" not in built.asm["ptx"], "scores in double precision are slow"


GPU_SHAPES = [(512, 32, 8, 2, 1000), (256, 32, 8, 3, 700), (768, 32, 12, 1, 2000), (512, None, 20, 2, 100), *SHAPES]


def fused(*inputs):
    """Return the mixture of the kernel; a mixture by torch would come with weights."""
    mixed, weights = mix(*inputs)
    assert weights is None
    return mixed


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_kernel_on_a_gpu(dtype):
    def read(*inputs):
        out, weights = read_latents(*inputs)
        assert weights is None
        return out

    assert largest_error(read, dtype, "cuda", GPU_SHAPES) < 3e-2


@pytest.mark.gpu
def test_every_token_hidden_gives_finite_numbers_on_a_gpu():
    query, cache, (_, visible, _, _, infinite, *_) = tensors(GPU_SHAPES[0], torch.bfloat16, "cuda")
    visible[0], infinite[0] = False, float("-inf")
    for mask in (visible, infinite):
        expected = cache.latent[0].float().mean(0)
        assert (fused(query, cache, mask, 0.2)[0].float() - expected).abs().max() < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [100, 1000])
@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_a_compiled_model_uses_the_kernel(mode, tokens):
    """The second mode records a CUDA graph, which is replayed with new numbers in the same memory."""

    def one_token(content, channel, latent, rotary, mask):
        return fused(LatentQuery(content, channel), LatentCache(latent, rotary), mask, 0.2)

    torch.compiler.reset()  # other tests have compiled the same function
    compiled = torch.compile(one_token, mode=mode, fullgraph=True, dynamic=False)
    query, cache, masks = tensors((512, 32, 8, 2, tokens), torch.bfloat16, "cuda")
    for mask in masks[:4]:
        inputs = [tensor.clone() for tensor in (*astuple(query), *astuple(cache))]
        for _ in range(4):
            inputs[0].neg_()
            expected = one_token(*inputs, mask)
            assert (compiled(*inputs, mask).float() - expected.float()).abs().max() < 1e-2


@pytest.mark.gpu
def test_the_kernel_in_a_recorded_graph():
    query, cache, masks = tensors(GPU_SHAPES[0], torch.bfloat16, "cuda")
    for mask in masks:
        fused(query, cache, mask, 0.2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            recorded = fused(query, cache, mask, 0.2)
        query.content.neg_()
        graph.replay()
        assert (recorded.float() - fused(query, cache, mask, 0.2).float()).abs().max() < 1e-2


@pytest.mark.gpu
def test_gradients_and_double_precision_use_torch_on_a_gpu():
    query, cache, _ = tensors(SHAPES[0], torch.bfloat16, "cuda")
    query.content.requires_grad_()
    assert mix(query, cache, None, 0.2)[1] is not None
    with torch.no_grad():
        assert mix(query, cache, None, 0.2)[1] is None
    assert mix(*tensors(SHAPES[0], torch.float64, "cuda")[:2], None, 0.2)[1] is not None


@pytest.mark.gpu
def test_a_mask_for_each_head_uses_torch_on_a_gpu():
    query, cache, (_, mask, *_) = tensors(SHAPES[0], torch.bfloat16, "cuda")
    of_each_head = mask.repeat(1, 4, 1, 1)
    of_each_head[:, 1:, :, 1:] = False
    mixed, weights = mix(query, cache, of_each_head, 0.2)
    assert torch.equal(mixed[:, 1:], cache.latent[:, :1].expand(-1, 3, -1))
    assert weights is not None
