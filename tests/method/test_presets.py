"""Methods: presets, JSON, layers, schedules and shares, and what each field does to a model's tensors."""

import copy
import itertools
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel

import oelm
from oelm import FeedForward, Method, MethodError, Projection
from oelm.method.matrices import orthogonality_error
from oelm.method.presets import ABOUT
from oelm.method.projections import CoreProjection, IdentityProjection
from oelm.method.schedule import advance
from oelm.method.sites import find_sites
from oelm.method.spec import KEEPING, ORTHONORMAL, PRESETS
from oelm.models.gpt import OelmGPTForCausalLM
from oelm.models.gpt_config import gpt_config
from oelm.models.small import small_model

HEADS, D_HEAD, WIDTH = 4, 12, 48  # of every small model used here


def attention(model, layer):
    return model.bert.encoder.layer[layer].attention.self


def frozen_paths(report):
    return [row.path for row in report.rows if row.frozen]


# Presets and JSON


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_restored_from_json(name):
    preset = PRESETS[name]
    restored = Method.load(json.loads(preset.to_json()))
    assert restored == preset
    assert hash(restored) == hash(preset)
    assert restored.to_json() == preset.to_json()
    assert restored.name == name
    assert Method.load(name) is preset
    assert Method.load(preset) is preset


def test_presets_are_distinct_and_each_is_described():
    assert set(ABOUT) == set(PRESETS)
    assert len({preset.to_json() for preset in PRESETS.values()}) == len(PRESETS)


projections = st.builds(
    lambda init, frozen, scale, scope, std: {
        "init": init,
        "frozen": frozen or init == "identity",
        "scale": scale,
        "scope": scope,
        "std": std if init == "gaussian" else None,
    },
    st.sampled_from(["default", "pretrained", "gaussian", *sorted(ORTHONORMAL)]),
    st.booleans(),
    st.floats(1e-3, 1e3) | st.integers(1, 9),
    st.sampled_from(["head", "global"]),
    st.floats(1e-4, 1) | st.just("matched"),
)


@settings(max_examples=60, deadline=None)
@given(projections, projections, st.booleans(), st.permutations(["q", "k", "ffn", "biases", "layers", "attention"]))
def test_json_does_not_depend_on_the_order_of_the_keys(q, k, ffn_frozen, order):
    fields = {"q": q, "k": k, "ffn": {"init": "qr", "frozen": ffn_frozen}, "biases": "trained"}
    fields |= {"layers": [2, 0], "attention": ["encoder"]}
    method = Method.load(fields)
    shuffled = Method.load({key: fields[key] for key in order})
    assert shuffled.to_json() == method.to_json()
    assert Method.load(json.loads(method.to_json())) == method


def test_a_dict_changes_only_the_named_fields_of_a_preset():
    method = Method.load({"preset": "oelm-freeze", "k": {"scale": 4}, "layers": "last:2"})
    assert method.k == Projection(init="qr", frozen=True, scale=4)
    assert method.q == PRESETS["oelm-freeze"].q
    assert method.layers == "last:2"
    assert method.name == "custom"
    assert Method.load({"preset": "oelm-freeze"}).name == "oelm-freeze"


def test_methods_and_presets_are_immutable():
    with pytest.raises(ValueError, match="frozen"):
        PRESETS["baseline"].core = "gain"
    with pytest.raises(TypeError):
        PRESETS["new"] = Method()


# Layers


@pytest.mark.parametrize(
    ("layers", "chosen"),
    [
        ("all", (0, 1, 2, 3, 4)),
        ("first:2", (0, 1)),
        ("first:5", (0, 1, 2, 3, 4)),
        ("last:2", (3, 4)),
        ("except-first:2", (2, 3, 4)),
        ("except-last:4", (0,)),
        ([3, 1], (1, 3)),
    ],
)
def test_each_form_of_layers_chooses_the_expected_indices(layers, chosen):
    assert Method.load({"preset": "oelm-freeze", "layers": layers}).choose_layers(5) == chosen


@pytest.mark.parametrize("layers", ["first:6", "last:6", "except-first:5", "except-last:5", [5], [0, 7]])
def test_layers_out_of_range_are_refused(layers):
    with pytest.raises(MethodError, match=r"layers .*(0 to 4|5 layers)"):
        Method.load({"preset": "oelm-freeze", "layers": layers}).choose_layers(5)


@pytest.mark.parametrize("layers", ["first:0", "first:-1", "first", "middle:2", "2", "", [], [1, 1], [-1], 2])
def test_malformed_layers_are_refused(layers):
    with pytest.raises(MethodError, match="layers"):
        Method.load({"preset": "oelm-freeze", "layers": layers})


def test_layers_that_are_not_chosen_stay_unchanged():
    model, plain = small_model("bert"), small_model("bert")
    report = oelm.apply(model, {"preset": "oelm-freeze", "layers": "except-first:1"})
    assert {row.layer for row in report.rows if row.frozen} == {"1", "2"}
    assert torch.equal(attention(model, 0).query.weight, attention(plain, 0).query.weight)
    assert not torch.equal(attention(model, 1).query.weight, attention(plain, 1).query.weight)


# What each preset does, on a model with biases and separate projections


# The presets that freeze the body are tested in test_adapters.py.
@pytest.mark.parametrize("name", [name for name, preset in PRESETS.items() if preset.rest == "trained"])
def test_a_preset_sets_and_freezes_the_matrices_that_its_fields_name(name):
    method = PRESETS[name]
    family = "bert" if method.down.untouched and method.channel.untouched else "oelm-gpt-latent"
    model, plain = small_model(family), small_model(family)
    report = oelm.apply(model, method.resolve(100))
    assert report.method == name
    for row in report.rows:
        field = "ffn" if row.role.startswith("ffn") else row.role.removesuffix("_q").removesuffix("_k")
        chosen = method.matrices if int(row.layer) in method.choose_layers(3) else {}
        spec = chosen.get(field, Projection())
        module, before = model.get_submodule(row.path), plain.get_submodule(row.path)
        assert row.init == spec.init
        assert (row.orthogonality_error is not None) == (spec.init in ORTHONORMAL - {"identity"})
        if spec.init == "identity":
            has_core = row.role == "q" and method.core == "matrix"
            assert isinstance(module.identity if has_core else module, IdentityProjection)
            assert row.state == ("trainable" if has_core else "no parameters")
            continue
        assert module.weight.requires_grad == (not spec.frozen)
        assert torch.equal(module.weight, before.weight) == (spec.init in KEEPING)
        if spec.init in ORTHONORMAL:
            per_head = row.role == "channel_q" or (row.role in ("q", "k") and spec.scope == "head")
            blocks = HEADS if per_head else 1
            assert row.orthogonality_error < 1e-5
            assert orthogonality_error(module.weight, blocks) < 1e-5
    changed = {name for name, p in plain.state_dict().items() if not torch.equal(p, model.state_dict().get(name, p))}
    set_paths = [row.path for row in report.rows if row.init not in KEEPING]
    assert all(any(name.startswith(path + ".") for path in set_paths) for name in changed)
    oelm.verify(model)


def test_oelm_freeze_freezes_query_and_key_with_their_biases_and_nothing_else():
    report = oelm.apply(small_model("bert"), "oelm-freeze")
    assert report.frozen == 3 * 2 * (WIDTH * WIDTH + WIDTH)
    assert report.trainable == report.total - report.frozen
    assert {row.role for row in report.rows if row.frozen} == {"q", "k"}


def test_qr_keeps_each_heads_subspace():
    model, plain = small_model("bert"), small_model("bert")
    oelm.apply(model, "oelm-freeze")
    for after, before in zip(
        attention(model, 0).key.weight.view(HEADS, D_HEAD, WIDTH),
        attention(plain, 0).key.weight.view(HEADS, D_HEAD, WIDTH),
        strict=True,
    ):
        # Projecting the old rows onto the new, orthonormal ones changes nothing: both span the same subspace.
        torch.testing.assert_close(before @ after.T @ after, before, atol=1e-6, rtol=0)


def test_polar_gives_the_nearest_orthonormal_rows():
    """These are nearer to the loaded rows than the rows of QR, which keeps only the direction of the first row."""
    distances = {}
    for name in ("oelm-polar", "oelm-freeze"):
        model, plain = small_model("bert"), small_model("bert")
        report = oelm.apply(model, name)
        assert report.frozen == 3 * 2 * (WIDTH * WIDTH + WIDTH)
        distances[name] = float((attention(model, 0).query.weight - attention(plain, 0).query.weight).detach().norm())
    assert distances["oelm-polar"] < distances["oelm-freeze"]


def test_random_presets_have_the_documented_row_lengths():
    lengths = {}
    for name in ("oelm-random", "oelm-random-matched", "oelm-random-orthogonal"):
        model = small_model("bert", hidden_size=480)
        oelm.apply(model, name)
        lengths[name] = attention(model, 0).query.weight.norm(dim=1).mean().item()
    assert lengths["oelm-random"] == pytest.approx(0.02 * 480**0.5, rel=0.01)
    assert lengths["oelm-random-matched"] == pytest.approx(1, rel=0.01)
    assert lengths["oelm-random-orthogonal"] == pytest.approx(1, rel=1e-5)


def test_the_bias_is_zero_beside_a_fresh_matrix_and_kept_beside_a_derived_one():
    for name, keeps_bias in (("oelm-random-orthogonal", False), ("oelm-random", False), ("oelm-freeze", True)):
        model = small_model("bert")
        with torch.no_grad():
            attention(model, 0).query.bias.fill_(0.5)
        oelm.apply(model, name)
        assert (attention(model, 0).query.bias == (0.5 if keeps_bias else 0)).all()


def test_identity_reads_each_heads_slice_and_has_no_parameters():
    model = small_model("bert")
    report = oelm.apply(model, "identity-key")
    hidden = torch.randn(2, 5, WIDTH)
    assert torch.equal(attention(model, 1).key(hidden), 2 * hidden)
    assert report.total == sum(p.numel() for p in small_model("bert").parameters()) - 3 * (WIDTH * WIDTH + WIDTH)
    assert report.frozen == 0


# Fields


@pytest.mark.parametrize("init", ["default", "orthogonal", "hadamard", "qr", "polar", "pretrained"])
def test_scale_is_a_factor_on_the_projections_output(init):
    outputs = []
    for scale in (1, 3):
        model = small_model("bert")
        with torch.no_grad():
            attention(model, 0).key.bias.normal_(generator=torch.Generator().manual_seed(0))
        method = {"q": {"init": "qr"}, "k": {"init": init, "frozen": True, "scale": scale}}
        report = oelm.apply(model, method, seed=5)
        errors = [row.orthogonality_error for row in report.rows if row.role == "k" and init in ORTHONORMAL]
        assert all(error < 1e-5 for error in errors)
        with torch.no_grad():
            outputs.append(attention(model, 0).key(torch.linspace(-1, 1, WIDTH)))
    torch.testing.assert_close(3 * outputs[0], outputs[1])


def test_biases_can_train_next_to_frozen_matrices():
    model = small_model("bert")
    report = oelm.apply(model, {"preset": "oelm-freeze", "biases": "trained"})
    assert report.frozen == 3 * 2 * WIDTH * WIDTH
    assert all(row.state == "frozen, rest trained" for row in report.rows if row.role in ("q", "k"))
    assert attention(model, 0).query.bias.requires_grad
    assert not attention(model, 0).query.weight.requires_grad


@pytest.mark.parametrize(
    ("name", "core", "shapes"),
    [
        ("bert", "gain", {"q": (4,)}),
        ("bert", "matrix", {"q": (4, 12, 12)}),
        ("llama", "gain", {"q": (4,)}),
        ("llama", "matrix", {"q": (4, 12, 12), "k": (2, 12, 12)}),  # rotary positions act between Q and K
    ],
)
def test_a_core_is_on_query_alone_or_on_both_sides_of_rotary_positions(name, core, shapes):
    model = small_model(name)
    report = oelm.apply(model, {"preset": "oelm-core", "core": core})
    _, sites = find_sites(model)
    for site, role in itertools.product(sites, ("q", "k")):
        module = model.get_submodule(site.roles[role])
        assert isinstance(module, CoreProjection) == (role in shapes)
        assert not module.weight.requires_grad
        if role in shapes:
            assert tuple(module.core.shape) == shapes[role]
            assert module.core.requires_grad
            start = torch.ones(shapes[role]) if core == "gain" else torch.eye(D_HEAD).expand(shapes[role])
            assert torch.equal(module.core, start)
    assert all(row.state == "frozen, rest trained" for row in report.rows if row.role in shapes)


@pytest.mark.parametrize("preset", ["oelm-core", "oelm-exact", "identity-core"])
@pytest.mark.parametrize(
    ("reach", "sizes"),
    [(2, (24, 24, 24)), ([4, 1, 2], (48, 12, 24)), ("first:2", (48, 48, 12)), ("first:3", (48, 48, 48))],
)
def test_reach_is_the_number_of_heads_that_share_a_core(preset, reach, sizes):
    model, plain = small_model("bert"), small_model("bert")
    oelm.apply(model, {"preset": preset, "reach": reach})
    assert [tuple(attention(model, layer).query.core.shape) for layer in range(3)] == [
        (WIDTH // size, size, size) for size in sizes
    ]
    if preset == "oelm-exact":
        ids = torch.arange(24).view(2, 12)
        torch.testing.assert_close(model.eval()(ids).logits, plain.eval()(ids).logits, atol=1e-5, rtol=0)


def test_a_core_with_reach_over_all_heads_mixes_them_and_reach_1_does_not():
    for reach, mixes in ((4, True), (1, False)):
        query = _first_query(small_model("bert"), reach)
        hidden = torch.randn(1, 1, WIDTH, generator=torch.Generator().manual_seed(0))
        changed = hidden.clone()
        changed[..., -1] += 1.0  # a coordinate of the last head
        assert torch.equal(query(hidden)[..., :D_HEAD], query(changed)[..., :D_HEAD]) != mixes


def _first_query(model, reach):
    oelm.apply(model, {"preset": "identity-core", "reach": reach})
    return attention(model, 0).query


def test_a_core_between_identities_starts_as_a_random_orthogonal_matrix():
    """The identity would make each token attend to itself, since query and key are the same slice."""
    first, same_seed, other_seed = (small_model("bert") for _ in range(3))
    for model, seed in ((first, 0), (same_seed, 0), (other_seed, 1)):
        oelm.apply(model, "identity-core", seed=seed)
    core = attention(first, 0).query.core
    torch.testing.assert_close(core @ core.mT, torch.eye(D_HEAD).expand(HEADS, -1, -1), atol=1e-5, rtol=0)
    assert core.diagonal(dim1=1, dim2=2).abs().mean() < 0.6
    assert torch.equal(core, attention(same_seed, 0).query.core)
    assert not torch.equal(core, attention(other_seed, 0).query.core)


@pytest.mark.parametrize("biases", ["frozen", "trained"])
def test_a_schedule_never_unfreezes_a_key_bias_without_effect(biases):
    model = small_model("bert")
    schedule = {"kind": "unfreeze", "steps": [5], "layers_each": 3}
    oelm.apply(model, {"preset": "oelm-exact", "biases": biases, "schedule": schedule})
    advance(model, 5)
    for layer in range(3):
        key, query = attention(model, layer).key, attention(model, layer).query
        assert key.weight.requires_grad
        assert query.bias.requires_grad
        assert not key.bias.requires_grad
    assert oelm.verify(model).tensors == 3


UNFREEZE = {"preset": "oelm-freeze", "schedule": {"kind": "unfreeze", "steps": [5], "layers_each": 3}}


@pytest.mark.parametrize("wrap", [torch.compile, torch.nn.DataParallel])
def test_a_schedule_advances_a_wrapped_model(wrap):
    model = small_model("bert")
    oelm.apply(model, UNFREEZE)
    assert len(advance(wrap(model), 5)) == 1
    assert attention(model, 0).query.weight.requires_grad


@pytest.mark.usefixtures("process_group")
def test_a_schedule_refuses_to_advance_a_distributed_wrapper():
    model = small_model("bert")
    oelm.apply(model, UNFREEZE)
    wrapped = torch.nn.parallel.DistributedDataParallel(model)
    assert advance(wrapped, 4) == []
    with pytest.raises(oelm.ModelError, match=r"DistributedDataParallel.*advance the unwrapped model"):
        advance(wrapped, 5)
    assert not attention(model, 0).query.weight.requires_grad
    advance(model, 5)
    assert attention(model, 0).query.weight.requires_grad


@pytest.mark.parametrize(
    ("reach", "message"),
    [
        (3, "does not divide its 4 heads"),
        ([1, 2], "2 layers.* 3"),
        ("first:9", "reach 'first:9' does not fit the 3 encoder layers"),
        (0, "reach"),
        ([], "reach"),
    ],
)
def test_a_reach_that_does_not_fit_is_refused(reach, message):
    with pytest.raises(MethodError, match=message):
        oelm.apply(small_model("bert"), {"preset": "identity-core", "reach": reach})


def test_reach_belongs_to_a_matrix_core():
    with pytest.raises(MethodError, match=r"reach 2 .*core 'matrix', but core is 'none'"):
        Method.load({"preset": "oelm-freeze", "reach": 2})


def test_oelm_exact_leaves_the_outputs_unchanged():
    model = small_model("bert").eval()
    with torch.no_grad():
        for layer in range(3):
            attention(model, layer).query.bias.normal_(generator=torch.Generator().manual_seed(layer))
            attention(model, layer).key.bias.normal_(generator=torch.Generator().manual_seed(9 + layer))
        ids = torch.arange(3, 23)[None]
        before = model(ids).logits
        oelm.apply(model, "oelm-exact")
        torch.testing.assert_close(model(ids).logits, before, atol=1e-5, rtol=1e-4)
    key = attention(model, 0).key
    assert not key.bias.requires_grad
    assert (key.bias == 0).all()  # a key bias has no effect beside a core on Q alone


def test_only_the_chosen_kinds_of_attention_are_frozen():
    model = small_model("t5")
    report = oelm.apply(model, {"preset": "oelm-freeze", "attention": ["cross", "encoder"]})
    assert {row.kind for row in report.rows if row.frozen} == {"cross", "encoder"}
    assert {row.kind for row in report.rows} == {"cross", "encoder", "decoder"}


def test_t5_queries_carry_the_scaling_that_its_attention_does_not_do():
    model = small_model("t5")
    oelm.apply(model, {"preset": "oelm-freeze", "q": {"scale": 3}})
    block = model.encoder.block[0].layer[0].SelfAttention
    assert block.q.weight.norm(dim=1).mean().item() == pytest.approx(3 / 12**0.5)
    assert block.k.weight.norm(dim=1).mean().item() == pytest.approx(1)


# Seeds


def test_methods_with_one_seed_share_the_matrix_of_every_tensor_that_both_draw():
    """A tensor's matrix does not depend on what else a method draws."""
    both, only_k, last = small_model("bert"), small_model("bert"), small_model("bert")
    spec = Projection(init="orthogonal", frozen=True)
    oelm.apply(both, "oelm-random-orthogonal", seed=3)
    oelm.apply(only_k, Method(k=spec), seed=3)
    oelm.apply(last, {"preset": "oelm-random-orthogonal", "layers": [2], "ffn": {"init": "orthogonal"}}, seed=3)
    for layer in range(3):
        assert torch.equal(attention(both, layer).key.weight, attention(only_k, layer).key.weight)
        assert torch.equal(attention(both, layer).value.weight, attention(only_k, layer).value.weight)
    assert torch.equal(attention(both, 2).query.weight, attention(last, 2).query.weight)
    drawn = [attention(both, layer).key.weight for layer in range(3)] + [attention(both, 0).query.weight]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(drawn, 2))


def test_apply_depends_on_its_seed_and_leaves_the_global_generator_unchanged():
    weights = {}
    for seed in (0, 0, 1):
        model = small_model("gpt2")
        state = torch.get_rng_state()
        oelm.apply(model, "oelm-core", seed=seed)
        assert torch.equal(torch.get_rng_state(), state)
        weights.setdefault(seed, []).append(model.transformer.h[0].attn.c_attn.q.weight)
    assert torch.equal(*weights[0])
    assert not torch.equal(weights[0][0], weights[1][0])


def test_saving_loading_and_exporting_leave_the_global_generator_unchanged(tmp_path):
    """So a run that exports its model halfway continues exactly like one that does not."""
    for name, method in itertools.product(("bert", "gpt2"), ("oelm-exact", "identity-key")):
        model = small_model(name)
        oelm.apply(model, method)
        state = torch.get_rng_state()
        model.save_pretrained(tmp_path / name / method)
        oelm.export(oelm.load(tmp_path / name / method), tmp_path / name / f"{method}-plain")
        assert torch.equal(torch.get_rng_state(), state)


def test_methods_built_on_the_weights_do_not_depend_on_the_seed():
    first, second = small_model("bert"), small_model("bert")
    oelm.apply(first, "oelm-freeze", seed=0)
    oelm.apply(second, "oelm-freeze", seed=1)
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))


# Shares


@pytest.fixture(scope="module")
def medium():
    """Return a GPT-2 of the studied size, with a small vocabulary."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(n_layer=6, n_embd=512, n_head=8, vocab_size=8192, n_positions=512))


MATRIX, FFN = 512 * 512, 512 * 2048
BLOCKS = 6 * (4 * MATRIX + 2 * FFN + 4 * 512 + 2048 + 512 + 4 * 512)
BIASES = 6 * 2 * 512


def by_share(medium, ratio):
    model = copy.deepcopy(medium)
    return model, oelm.apply(model, {"preset": "oelm-qk-ffn", "freeze_ratio": ratio})


def ffn_in(*layers):
    return [f"transformer.h.{layer}.mlp.c_fc" for layer in layers]


def qk(*layers):
    return [f"transformer.h.{layer}.attn.c_attn.{role}" for layer in layers for role in "qk"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("ratio", "frozen", "paths"),
    [
        (0.10, 7 * (MATRIX + 512), [*qk(3, 4, 5), "transformer.h.2.attn.c_attn.q"]),
        ("qk", 12 * MATRIX + BIASES, qk(*range(6))),
        (0.25, 12 * MATRIX + BIASES + 2 * FFN, qk(*range(6)) + ffn_in(4, 5)),
        (0.50, 12 * MATRIX + BIASES + 6 * FFN, qk(*range(6)) + ffn_in(*range(6))),
    ],
)
def test_a_share_is_taken_in_whole_tensors_from_the_last_layer_to_the_first(medium, ratio, frozen, paths):
    model, report = by_share(medium, ratio)
    assert sorted(frozen_paths(report)) == sorted(paths)
    assert report.frozen == report.frozen_in_blocks == frozen
    assert report.blocks == BLOCKS
    assert report.frozen_share_of_blocks == frozen / BLOCKS
    assert report.frozen_share == frozen / sum(p.numel() for p in model.parameters())
    not_frozen = next(row for row in report.rows if row.role == "ffn_out")
    assert torch.equal(model.get_submodule(not_frozen.path).weight, medium.get_submodule(not_frozen.path).weight)


def test_the_frozen_shares_of_the_study(medium):
    """Q, K and all of FFN-in count as one half, although norms and some biases train: the exact share is 49.9 %."""
    shares = {ratio: by_share(medium, ratio)[1].frozen_share_of_blocks for ratio in ("qk", 0.25, 0.50)}
    assert {ratio: round(share, 3) for ratio, share in shares.items()} == {"qk": 0.167, 0.25: 0.278, 0.50: 0.499}


def test_the_reference_counts_of_the_gpt():
    """medium-512 with GPT-2's vocabulary has exactly the parameter counts that the documents state."""
    model = OelmGPTForCausalLM(gpt_config("medium-512"))
    report = oelm.apply(model, "oelm-freeze")
    assert (report.total, report.frozen, report.trainable) == (44_896_768, 3_145_728, 41_751_040)
    assert f"{report.frozen_share:.1%}" == "7.0%"
    assert f"{report.frozen_share_of_blocks:.1%}" == "16.6%"
    half = OelmGPTForCausalLM(gpt_config("medium-512"))
    report = oelm.apply(half, {"preset": "oelm-qk-ffn", "freeze_ratio": 0.5})
    assert f"{report.frozen_share_of_blocks:.1%}" == "49.9%"
    assert {row.role for row in report.rows if row.frozen} == {"q", "k", "ffn_in"}


def test_a_share_beyond_q_k_and_ffn_in_freezes_ffn_out_of_the_last_layers(medium):
    _, report = by_share(medium, 0.60)
    assert [row.path for row in report.rows if row.role == "ffn_out" and row.frozen] == [
        f"transformer.h.{layer}.mlp.c_proj" for layer in (4, 5)
    ]


def test_the_error_for_a_share_that_is_too_large_names_the_largest_possible(medium):
    with pytest.raises(MethodError, match=r"freeze_ratio 0\.9: .* only 83\.2% of the blocks"):
        by_share(medium, 0.9)


def test_the_share_qk_needs_no_frozen_feed_forward_matrices():
    report = oelm.apply(small_model("bert"), {"preset": "oelm-freeze", "freeze_ratio": "qk"})
    assert report.frozen == oelm.apply(small_model("bert"), "oelm-freeze").frozen


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "first:1"}, "leave layers at 'all'"),
        ({"q": {"frozen": False}}, "set frozen to true for both"),
        ({"ffn": {"frozen": False}}, r"set ffn\.frozen to true"),
        ({"core": "gain"}, "does not go with a core"),
        ({"k": {"init": "identity"}}, "does not go with a core or an identity"),
        ({"freeze_ratio": 0}, "freeze_ratio: .*greater than 0"),
        ({"freeze_ratio": 1}, "freeze_ratio: .*less than 1"),
    ],
)
def test_fields_that_contradict_freeze_ratio_are_refused(changes, message):
    with pytest.raises(MethodError, match=message):
        Method.load({"preset": "oelm-qk-ffn", "freeze_ratio": 0.5, **changes})


def test_feed_forward_matrices_are_orthonormal_on_their_shorter_side_and_their_biases_train():
    model = small_model("bert")
    oelm.apply(model, Method(ffn=FeedForward(init="orthogonal", frozen=True)), seed=1)
    layer = model.bert.encoder.layer[0]
    tall, wide = layer.intermediate.dense.weight, layer.output.dense.weight
    torch.testing.assert_close(tall.T @ tall, torch.eye(WIDTH), atol=1e-5, rtol=0)
    torch.testing.assert_close(wide @ wide.T, torch.eye(WIDTH), atol=1e-5, rtol=0)
    assert layer.intermediate.dense.bias.requires_grad
