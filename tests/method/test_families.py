"""Methods on every model family: what they change, that frozen tensors stay frozen, and which presets do not fit."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from transformers import T5Config, T5ForConditionalGeneration

import oelm
from oelm.method.diagnose import sample_batch, train_steps
from oelm.method.sites import find_sites, weight_matrix
from oelm.method.spec import PRESETS
from oelm.models.small import SMALL, small_model
from tests.support.models import (
    CHECKS,
    assert_exports,
    assert_loads_back,
    distance,
    hashes,
    lively,
    lively_model,
    logits,
    model_with_method,
)
from tests.support.refusals import REFUSED

families = pytest.mark.parametrize("name", SMALL)

# The presets, besides oelm-freeze, that put other modules into the model.
STRUCTURES = ("oelm-exact", "identity-query", "identity-key", "identity-wide")


@pytest.mark.covering(2)
@families
@pytest.mark.parametrize("check", CHECKS)
def test_every_family_passes_every_check(name, check, tmp_path):
    CHECKS[check](name, tmp_path)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("name", "preset"), [pair for pair in itertools.product(SMALL, STRUCTURES) if pair not in REFUSED]
)
def test_every_kind_of_module_is_saved_loaded_and_exported(name, preset, tmp_path):
    model = model_with_method(name, preset, steps=1)
    assert_loads_back(model, tmp_path / "saved")
    assert_exports(model, tmp_path / "plain")


@pytest.mark.covering(3)
@families
@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_works_or_is_refused_with_a_reason(name, preset):
    if PRESETS[preset].adapter.kind != "none":
        pytest.importorskip("peft")
    model = lively_model(name)
    before = logits(model)
    method = PRESETS[preset].resolve(100)
    if (name, preset) in REFUSED:
        hashes_before = hashes(model, frozen=False)
        with pytest.raises(oelm.MethodError, match=re.escape(REFUSED[name, preset])):
            oelm.apply(model, method)
        assert hashes(model, frozen=False) == hashes_before, "a refused method must not change the model"
        assert oelm.audit(model).method == "baseline"
        return
    report = oelm.apply(model, method)
    assert report.method == preset
    assert (report.frozen > 0) is (hashes(model, frozen=True) != {})
    after = logits(model)
    assert after.isfinite().all()
    keeping = ("baseline", "freeze-pretrained", "freeze-early", "oelm-exact")
    keeps_outputs = preset in keeping or PRESETS[preset].rest != "trained"
    assert (distance(after, before) < 1e-4) is keeps_outputs
    train_steps(model, 1)
    oelm.verify(model)
    assert distance(logits(model), after) > 0


@pytest.mark.sample(3)
@families
def test_a_hundred_steps_with_weight_decay_change_no_frozen_tensor(name):
    model = model_with_method(name)
    frozen, trained = hashes(model, frozen=True), hashes(model, frozen=False)
    train_steps(model, 100, weight_decay=0.1)
    assert hashes(model, frozen=True) == frozen
    after = hashes(model, frozen=False)
    assert [n for n in trained if after[n] == trained[n]] == []
    oelm.verify(model)


@pytest.mark.covering(2)
@pytest.mark.parametrize(
    ("name", "changes"),
    [(name, {}) for name in SMALL]
    # With alibi nothing acts on Falcon's grouped queries and keys, so there is one core between them.
    + [("falcon-7b", {"alibi": True}), ("falcon-40b", {"alibi": True})],
    ids=[*SMALL, "falcon-7b-alibi", "falcon-40b-alibi"],
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.float64, 1e-10)], ids=["float32", "float64"]
)
@pytest.mark.parametrize("preset", ["oelm-exact", "freeze-pretrained"])
def test_outputs_are_unchanged_at_step_zero(name, changes, preset, dtype, tolerance):
    model = lively_model(name, **changes).to(dtype)
    before = logits(model)
    oelm.apply(model, preset)
    # GPT-Neo's attention and Mixtral's routing compute in float32, whatever the model's dtype.
    assert distance(logits(model), before) < (1e-4 if name in ("gpt_neo", "mixtral") else tolerance)


@families
def test_a_lost_bias_or_a_changed_mask_shows_in_the_outputs(name):
    """So the tests above, with these models and batches, would fail on either mistake."""
    model = lively_model(name)
    before = logits(model)
    family, sites = find_sites(model)
    oelm.apply(model, "freeze-pretrained")
    # A key's bias adds one number to a whole row of scores, which shows only where something acts on K besides Q.
    visible = ("q", "k") if family.meets(model.config) else ("q",)
    for role in visible:
        module = model.get_submodule(sites[0].roles[role])
        if module.bias is None:
            continue
        original = module.bias.detach().clone()
        module.bias.data.zero_()
        assert distance(logits(model), before) > 1e-3
        module.bias.data.copy_(original)
    batch = sample_batch(model)
    if "attention_mask" in batch:
        batch["attention_mask"] = torch.ones_like(batch["attention_mask"])
        with torch.no_grad():
            assert distance(model(**batch).logits, before) > 1e-3


@families
def test_roles_and_heads_are_where_the_model_uses_them(name):
    """A query head changes its own attention map, a key head those of its group, and a value head none.

    The test reads the model's own attention maps, so it fails on a table entry with swapped roles or wrong heads.
    """
    model = lively_model(name, attn_implementation="eager")
    oelm.apply(model, "freeze-pretrained")
    before = _first_maps(model)
    _, sites = find_sites(model)
    first_sites = {site.kind: site for site in reversed(sites)}
    assert set(before) == set(first_sites)
    for kind, site in first_sites.items():
        group = site.heads // site.kv_heads
        for role, heads in (("q", site.heads), ("k", site.kv_heads), ("v", site.kv_heads)):
            weight = weight_matrix(model.get_submodule(site.roles[role])).detach()
            for head in range(heads):
                rows = weight[head * site.d_head : (head + 1) * site.d_head]
                rows.neg_()
                change = (_first_maps(model)[kind] - before[kind]).abs().amax(dim=(0, 2, 3))
                rows.neg_()
                expected = {"q": [head], "k": list(range(head * group, (head + 1) * group)), "v": []}[role]
                assert (change > 1e-3).nonzero().flatten().tolist() == expected, (kind, role, head)


def _first_maps(model: Any) -> dict[str, torch.Tensor]:
    """Return the attention maps (batch, heads, queries, keys) of the first layer of each kind of attention."""
    with torch.no_grad():
        output = model(**sample_batch(model), output_attentions=True)
    kinds = {f"{kind}_attentions": kind for kind in ("encoder", "decoder", "cross")}
    kinds["attentions"] = find_sites(model)[1][0].kind
    return {kind: output[field][0] for field, kind in kinds.items() if output.get(field)}


@families
def test_every_matrix_of_a_block_has_a_role(name):
    """Only tables of relative positions and their projections, and experts, have no role."""
    model = small_model(name)
    _, sites = find_sites(model)
    paths_with_role = {path for site in sites for path in (*site.roles.values(), *(p for _, p in site.feed_forward))}
    paths_with_role |= {site.fused_path for site in sites if site.fused}
    blocks = {site.block for site in sites}
    for path, parameter in model.named_parameters():
        if parameter.ndim > 1 and any(path.startswith(f"{block}.") for block in blocks):
            module = path.removesuffix(".weight")
            without_role = r"relative_attention_bias|pos_(key|query)_proj|mlp\.(gate$|experts\.)"
            assert module in paths_with_role or re.search(without_role, module), path


# The parameters of each kind of attention, written down independently of oelm's table.
KINDS = {
    "t5": {
        "encoder": r"encoder\.block\.\d\.layer\.0\.SelfAttention\.[qk]\.",
        "decoder": r"decoder\.block\.\d\.layer\.0\.SelfAttention\.[qk]\.",
        "cross": r"decoder\.block\.\d\.layer\.1\.EncDecAttention\.[qk]\.",
    },
    "bart": {
        "encoder": r"model\.encoder\.layers\.\d\.self_attn\.[qk]_proj\.",
        "decoder": r"model\.decoder\.layers\.\d\.self_attn\.[qk]_proj\.",
        "cross": r"model\.decoder\.layers\.\d\.encoder_attn\.[qk]_proj\.",
    },
    "whisper": {
        "encoder": r"model\.encoder\.layers\.\d\.self_attn\.[qk]_proj\.",
        "decoder": r"model\.decoder\.layers\.\d\.self_attn\.[qk]_proj\.",
        "cross": r"model\.decoder\.layers\.\d\.encoder_attn\.[qk]_proj\.",
    },
    "bert-cross": {
        "decoder": r"bert\.encoder\.layer\.\d\.attention\.self\.(query|key)\.",
        "cross": r"bert\.encoder\.layer\.\d\.crossattention\.self\.(query|key)\.",
    },
    "gpt2-cross": {
        "decoder": r"transformer\.h\.\d\.attn\.c_attn\.[qk]\.",
        "cross": r"transformer\.h\.\d\.crossattention\.(q_attn|c_attn\.k)\.",
    },
}


@pytest.mark.parametrize(("name", "kind"), [(name, kind) for name, kinds in KINDS.items() for kind in kinds])
def test_each_kind_of_attention_can_be_chosen(name, kind):
    model = model_with_method(name, {"preset": "oelm-freeze", "attention": [kind]})
    frozen = set(hashes(model, frozen=True))
    assert frozen == {n for n, _ in model.named_parameters() if re.match(KINDS[name][kind], n)}
    layers = {"encoder": 2, "decoder": 3, "cross": 3}[kind]
    weights = [n for n in frozen if n.endswith(".weight")]
    assert len(weights) == 2 * layers
    all_kinds = set(hashes(model_with_method(name), frozen=True))
    each_kind = [
        set(hashes(model_with_method(name, {"preset": "oelm-freeze", "attention": [k]}), frozen=True))
        for k in KINDS[name]
    ]
    assert set().union(*each_kind) == all_kinds


def test_a_kind_of_attention_that_the_model_lacks_is_refused():
    with pytest.raises(oelm.MethodError, match=r"attention cross.* only encoder"):
        model_with_method("bert", {"preset": "oelm-freeze", "attention": ["cross"]})


@pytest.mark.parametrize(("groups", "inner"), [(1, 1), (2, 2)])
def test_albert_counts_distinct_modules(groups, inner):
    model = lively_model("albert", num_hidden_layers=4, num_hidden_groups=groups, inner_group_num=inner)
    report = oelm.apply(model, "oelm-freeze")
    assert report.frozen == groups * inner * 2 * (48 * 48 + 48)
    assert [row.layer for row in report.rows if row.role == "q"] == ["shared"] * (groups * inner)


@pytest.mark.parametrize("layers", ["first:1", "last:1", "except-first:1", [0]])
def test_choosing_layers_of_albert_is_refused(layers):
    with pytest.raises(oelm.MethodError, match="one attention module for all its layers"):
        model_with_method("albert", {"preset": "oelm-freeze", "layers": layers})


def test_an_identity_query_is_refused_where_heads_are_not_slices_of_the_hidden_state():
    with pytest.raises(oelm.MethodError, match="4 x 16 is not 48"):
        model_with_method("qwen3", {"q": {"init": "identity", "frozen": True}})


def test_scores_keep_their_size_whatever_the_attention_divides_them_by():
    """Gemma 2 divides by the root of a number of its config: 6 here, where heads of 16 would make it 4."""
    model = small_model("gemma2")
    before = [site.d_head for site in find_sites(model)[1]]
    oelm.apply(model, "oelm-freeze")
    attention = model.model.layers[0].self_attn
    rows = attention.q_proj.weight.detach()[:16] * attention.scaling
    assert before == [16] * 3
    torch.testing.assert_close(rows @ rows.T, torch.eye(16) / 16)
    same = small_model("gemma2", query_pre_attn_scalar=16)
    oelm.apply(same, "oelm-freeze")
    assert {matrix["factor"] for matrix in same.config.oelm["matrices"].values()} == {1.0}


def test_a_gain_needs_a_norm_that_leaves_the_heads_relative_lengths():
    """OLMo 2 normalises all heads together, so a factor of one head changes its scores; Qwen 3 each by itself."""
    method = {"preset": "oelm-freeze", "core": "gain"}
    with pytest.raises(oelm.MethodError, match="a gain has no effect"):
        model_with_method("qwen3", method)
    model = model_with_method("olmo2", method)
    before = logits(model)
    gain = model.get_parameter("model.layers.0.self_attn.q_proj.core")
    with torch.no_grad():
        gain.copy_(torch.tensor([2.0, 1, 1, 1]))
    of_one_head = distance(logits(model), before)
    with torch.no_grad():
        gain.fill_(2.0)
    assert distance(logits(model), before) < 0.01 * of_one_head  # not 0, because of the norm's epsilon


def test_t5_scores_keep_their_size():
    """T5 does not divide its scores by sqrt(d_head): without that factor in Q they would be 8 times too large."""
    config = T5Config(d_model=256, d_kv=64, num_heads=4, num_layers=1, d_ff=64, vocab_size=96, decoder_start_token_id=0)
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(config)
    oelm.apply(model, "oelm-freeze")
    outputs = {}
    attention = model.encoder.block[0].layer[0].SelfAttention
    for role in ("q", "k"):
        getattr(attention, role).register_forward_hook(lambda _, __, out, role=role: outputs.update({role: out}))
    logits(model)
    q, k = (outputs[role].unflatten(-1, (4, 64)).transpose(1, 2) for role in ("q", "k"))
    assert 0.8 < float((q @ k.mT).std()) < 1.25


@pytest.mark.covering(2)
@pytest.mark.parametrize("name", ["bert", "gpt2", "falcon-40b", "deberta-v2", "t5"])
@pytest.mark.parametrize(
    "method",
    [
        {"preset": "oelm-freeze", "core": "gain"},
        {"preset": "oelm-exact", "biases": "trained", "layers": "last:1"},
        {"preset": "oelm-qk-ffn", "freeze_ratio": 0.4},
        {"q": {"init": "polar", "frozen": True}, "k": {"init": "polar", "frozen": True}, "core": "matrix"},
        {"q": {"init": "hadamard", "frozen": True, "scale": 1.5}},
        {"q": {"init": "identity", "frozen": True}, "k": {"init": "identity", "frozen": True}, "core": "matrix"},
    ],
    ids=["gain", "last layer", "share", "polar", "hadamard query", "identities with a core"],
)
def test_methods_beyond_the_presets_are_saved_loaded_and_exported(name, method, tmp_path):
    model = model_with_method(name, method, steps=1)
    assert_loads_back(model, tmp_path / "saved")
    assert_exports(model, tmp_path / "plain")


def test_a_lively_model_depends_on_its_seed_alone():
    first, same, other = (lively(small_model("bert"), seed) for seed in (0, 0, 1))
    assert torch.equal(logits(first), logits(same))
    assert not torch.equal(logits(first), logits(other))
