"""Methods on models with a latent and a rotary channel: the matrices to both, schedules, shares and adapters."""

import pytest
import torch

import oelm
from oelm import MethodError
from oelm.method.diagnose import diagnose, train_steps
from oelm.method.matrices import orthogonality_error
from oelm.method.schedule import advance
from tests.support.models import assert_loads_back, distance, flip_bit, freeze_error, hashes, lively_model

LAYERS, WIDTH, LATENT, HEADS, CHANNEL = 3, 48, 24, 4, 8  # of the models here, unless a test says otherwise
FRESH = {"init": "orthogonal", "frozen": True}


def latent_model(**changes):
    return lively_model("oelm-gpt-latent", **{"latent": LATENT, **changes})


def attention(model, layer=0):
    return model.transformer.h[layer].attn


def logits_by_single_tokens(model, ids):
    """Return the logits of a text that is read in two parts and then token by token, with a cache."""
    cache, parts = None, []
    for part in ids.split([5, 3, *[1] * (ids.shape[1] - 8)], dim=1):
        with torch.no_grad():
            out = model(part, past_key_values=cache, use_cache=True)
        cache, parts = out.past_key_values, [*parts, out.logits]
    return torch.cat(parts, 1)


# The matrix to the latent, and the channel's


@pytest.mark.parametrize("init", ["orthogonal", "hadamard", "qr", "polar"])
def test_rows_to_the_latent_are_orthonormal_over_all_of_it(init, tmp_path):
    model = latent_model()
    report = oelm.apply(model, {"down": {"init": init, "frozen": True}})
    assert report.frozen == LAYERS * LATENT * WIDTH
    for layer in range(LAYERS):
        assert orthogonality_error(attention(model, layer).down_proj.weight.detach(), 1) < 1e-5
    assert_loads_back(model, tmp_path)


def test_rows_of_the_channel_are_orthonormal_per_head_and_for_the_shared_key():
    model = latent_model()
    report = oelm.apply(model, {"channel": FRESH})
    channel = attention(model).channel
    assert channel.q_proj.weight.shape == (HEADS * CHANNEL, WIDTH)
    assert orthogonality_error(channel.q_proj.weight.detach(), HEADS) < 1e-5
    assert orthogonality_error(channel.k_proj.weight.detach(), 1) < 1e-5
    assert report.frozen == LAYERS * (HEADS + 1) * CHANNEL * WIDTH


def test_identity_channel_has_neither_a_matrix_to_the_latent_nor_one_to_the_keys():
    plain, model = latent_model(latent=WIDTH), latent_model(latent=WIDTH)
    report = oelm.apply(model, "identity-channel")
    assert plain.num_parameters() - report.total == LAYERS * 2 * WIDTH**2
    assert report.frozen == 0
    assert {row.role for row in report.rows if row.state == "no parameters"} == {"down", "k"}


def test_a_changed_bit_in_the_matrix_to_the_latent_is_found():
    model = latent_model()
    oelm.apply(model, "latent-frozen")
    flip_bit(attention(model, 2).down_proj.weight)
    assert "transformer.h.2.attn.down_proj.weight: its content changed" in freeze_error(model)


@pytest.mark.parametrize(
    ("method", "fields", "message"),
    [
        ("latent-frozen", {"latent": 0, "channel": 0}, r"the matrix to a latent.* field latent=256"),
        ({"channel": FRESH}, {"channel": 0}, r"a rotary channel.* field channel=32"),
        ("identity-channel", {}, r"k_proj \(k\): identity needs a latent of heads x d_head, but 4 x 12 is not 24"),
        ("latent-states", {}, r"down_proj .* identity needs a latent as wide as the hidden state, 48, but it has 24"),
        ("oelm-global", {}, r"k_proj \(k\): 48 rows of width 24 cannot be orthonormal over all heads"),
        ({"down": {"init": "identity"}}, {}, "init 'identity' removes the matrix"),
        ({"preset": "latent-frozen", "freeze_ratio": "qk"}, {}, "freeze_ratio freezes Q and K first"),
        ({"preset": "oelm-freeze", "down": FRESH, "freeze_ratio": "qk"}, {}, "leave down and channel alone"),
        ({"preset": "latent-frozen", "rest": "head"}, {}, "leave q, k, ffn, down, channel as they are"),
        ({"preset": "latent-states", "schedule": {"kind": "freeze", "steps": [3]}}, {}, "an identity has no matrix"),
    ],
)
def test_methods_that_do_not_fit_are_refused_and_change_nothing(method, fields, message):
    model = latent_model(**fields)
    before = hashes(model, frozen=False)
    with pytest.raises(MethodError, match=message):
        oelm.apply(model, method)
    assert hashes(model, frozen=False) == before


# What else a method can be made of


@pytest.mark.parametrize(
    "method",
    [
        {"preset": "oelm-freeze", "core": "gain"},
        {"preset": "oelm-core", "reach": 2},
        {"preset": "oelm-exact", "down": FRESH, "layers": "last:2"},
        {"preset": "oelm-qk-ffn", "freeze_ratio": 0.3},
        {"preset": "latent-frozen", "q": FRESH, "k": FRESH, "ffn": FRESH, "channel": FRESH},
    ],
    ids=["gain", "core over two heads", "exact core", "share", "everything frozen"],
)
def test_cores_and_shares_train_save_load_and_decode(method, tmp_path):
    model = latent_model()
    diagnosis = diagnose(model, method)
    assert diagnosis.healthy, (diagnosis.frozen_but_moved, diagnosis.trainable_but_still)
    assert_loads_back(model.eval(), tmp_path)
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    assert distance(logits_by_single_tokens(model, ids), whole) < 1e-4


def test_a_schedule_unfreezes_the_matrix_to_the_latent_layer_by_layer():
    model = latent_model()
    oelm.apply(model, {"preset": "latent-frozen", "schedule": {"kind": "unfreeze", "steps": [1, 2], "layers_each": 2}})
    counts = []
    for step in range(3):
        advance(model, step)
        train_steps(model, 1)
        oelm.verify(model)
        counts.append(sum(not attention(model, layer).down_proj.weight.requires_grad for layer in range(LAYERS)))
    assert counts == [3, 1, 0]


def test_a_schedule_freezes_a_trained_latent():
    model = latent_model()
    oelm.apply(model, {"preset": "latent-frozen", "schedule": {"kind": "freeze", "steps": [2]}})
    assert attention(model).down_proj.weight.requires_grad
    train_steps(model, 2)
    advance(model, 2)
    frozen = hashes(model, frozen=True)
    assert len(frozen) == LAYERS
    train_steps(model, 1)
    assert hashes(model, frozen=True) == frozen
    oelm.verify(model)


@pytest.mark.parametrize("kind", ["lora", "oft"])
def test_adapters_on_keys_and_values_of_a_latent(kind, tmp_path):
    """A key is then not just a matrix times the latent, so it is computed again for every cached token."""
    pytest.importorskip("peft")
    model = latent_model()
    report = oelm.apply(model, {"preset": kind, "adapter": {"targets": ["k", "v"], "rank": 4}})
    # LoRA: 4 rows of each side; OFT: blocks of 4 along the latent, each with 4 * 3 / 2 angles.
    of_one = {"lora": 4 * (LATENT + WIDTH), "oft": LATENT // 4 * 6}[kind]
    assert report.adapter_trainable == LAYERS * 2 * of_one
    train_steps(model, 2, learning_rate=0.1)
    assert_loads_back(model.eval(), tmp_path)
    ids = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
    assert distance(logits_by_single_tokens(model, ids), whole) < 1e-4


def test_an_adapter_on_a_key_that_is_the_value_too_is_one_adapter():
    pytest.importorskip("peft")
    both, one = (lively_model("oelm-gpt", shared_kv=True) for _ in range(2))
    reports = [
        oelm.apply(model, {"preset": "lora", "adapter": {"targets": targets, "rank": 4}})
        for model, targets in ((both, ["k", "v"]), (one, ["k"]))
    ]
    assert reports[0].adapter_trainable == reports[1].adapter_trainable == LAYERS * 4 * 2 * WIDTH
    assert diagnose(both).healthy
