"""Named forms of attention as arms of a benchmark: what they set, where they fit, and their steps side by side."""

import json

import pytest
from typer.testing import CliRunner

from oelm.bench.arms import BenchSetting, plan_arms
from oelm.bench.forms import DEFAULT_FORMS, FORMS
from oelm.cli.app import app
from oelm.errors import ConfigError
from oelm.method.presets import PRESET_FIELDS
from oelm.models.gpt_config import SIZES
from oelm.models.hf_config import build_hf_config

MODELS = ["gpt:tiny", "gpt:modern-tiny"]


def planned(*names: str, model: str, **setting: object):
    return plan_arms(names, BenchSetting(model=model, vocab_size=64, length=32, **setting))


def command(*arguments: object):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def fitting(model: str) -> list[str]:
    """Return the forms that can be timed with --decode on a model."""
    return [name for name, form in FORMS.items() if form.decodes_rotated or "modern" not in model]


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize("model", MODELS)
def test_cache_bytes_of_every_form(model):
    small = ("--steps", 1, "--rounds", 1, "--vocab-size", 64, "model.fields.num_hidden_layers=1")
    result = command(
        "--decode", *fitting(model), "--model", model, "--batch-size", 2, "--sequence-length", 8, *small, "--json"
    )
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["error"] for row in rows] == [None] * len(rows)
    width, d_head, channel = 256, 64, 32
    expected = {  # numbers of a token in one layer; the last has bytes
        "multi-head": 2 * width,
        "grouped-2": width,
        "grouped-4": width // 2,
        "multi-query": 2 * d_head,
        "shared-kv": width,
        "thin-keys": width // 4 + width,
        "states": width + (channel if "modern" in model else 0),
        "identity-key": width,
        "identity-channel": width + channel,
        "latent": width // 2 + channel,
        "latent-frozen": width // 2 + channel,
        "latent-frozen-quarter": width // 4 + channel,
        "orthogonal-key": width,
        **dict.fromkeys(("offset", "convolution", "frozen-offset", "frozen-convolution"), 2 * width),
        "frozen-channel": 2 * width + channel * width // d_head,  # each head's key has a copy of the channel's
        "linear": (3 if "modern" in model else 2) * width,
        "multi-head-fp8": 2 * width / 4,
    }
    assert {row["arm"]: row["cache_bytes_per_token"] / 4 for row in rows} == {
        name: expected[name] for name in fitting(model)
    }


@pytest.mark.full
@pytest.mark.sample(1)
@pytest.mark.parametrize("model", MODELS)
def test_training_steps_of_every_form_side_by_side(model):
    names = [name for name, form in FORMS.items() if not form.float8_cache]
    small = ("--batch-size", 2, "--sequence-length", 8, "--vocab-size", 64, "--rounds", 1, "--steps", 1)
    result = command(*names, "--model", model, *small, "model.fields.num_hidden_layers=1", "--json")
    assert result.exit_code == 0, result.output
    rows = {row["arm"]: row for row in json.loads(result.stdout)}
    assert list(rows) == names
    assert rows["multi-head"]["flop_bound"] == 1.0
    for cheaper in ("grouped-2", "multi-query", "shared-kv", "thin-keys"):
        assert rows[cheaper]["flop_bound"] < 1.0
        assert rows[cheaper]["trainable"] < rows["multi-head"]["trainable"]
    assert rows["latent-frozen"]["trainable"] < rows["latent"]["trainable"]


@pytest.mark.parametrize("model", [f"gpt:{prefix}{size}" for size in SIZES for prefix in ("", "modern-")])
def test_the_default_forms_fit_every_size(model):
    for arm in planned(*DEFAULT_FORMS, model=model, decode=True).values():
        build_hf_config(arm.model, None, 32)


def test_a_name_that_is_both_is_the_form_on_the_gpt_and_the_preset_elsewhere():
    assert {"latent-frozen", "identity-key", "identity-channel"} == set(FORMS) & set(PRESET_FIELDS)
    (form,) = planned("latent-frozen", model="gpt:modern-tiny").values()
    assert form.model.fields["latent"] == 128
    assert form.method.name == "latent-frozen"
    (preset,) = planned("identity-key", model="random:bert").values()
    assert "latent" not in preset.model.fields
    assert preset.method.name == "identity-key"


def test_an_override_has_the_last_word_and_a_form_may_have_its_own_batch_size():
    arms = planned("latent", "grouped-2@4", model="gpt:tiny", overrides=["model.fields.channel=16"])
    assert arms["latent"].model.fields["channel"] == 16
    assert arms["grouped-2@4"].model.fields["num_key_value_heads"] == 2
    assert arms["grouped-2@4"].train.batch_size == 4


@pytest.mark.parametrize(
    ("name", "model", "decode", "parts"),
    [
        ("multi-query", "random:llama", False, ["'multi-query'", "gpt:SIZE"]),
        ("grouped-4", "gpt:small", False, ["'grouped-4'", "groups of 4", "6 heads"]),
        ("multi-head-fp8", "gpt:tiny", False, ["'multi-head-fp8'", "--decode"]),
        ("identity-key", "gpt:modern-tiny", True, ["'identity-key'", "rotary", "identity-channel"]),
        ("identiy-channel", "gpt:tiny", True, ["'identiy-channel'", "--forms", "'identity-channel'"]),
    ],
)
def test_a_form_that_does_not_fit_or_exist_is_refused(name, model, decode, parts):
    with pytest.raises(ConfigError, match=".*".join(parts)):
        planned(name, model=model, decode=decode)
    result = command(name, "--model", model, *(["--decode"] if decode else []))
    assert result.exit_code == 2
    assert all(part in result.stderr for part in parts), result.stderr


def test_the_forms_are_listed():
    listed = command("--forms").stdout.splitlines()
    assert [line.split()[0] for line in listed] == list(FORMS)
    assert all(form.about in line for form, line in zip(FORMS.values(), listed, strict=True))


def test_the_default_of_decode_is_forms_on_the_gpt(monkeypatch):
    names = []
    monkeypatch.setattr("oelm.bench.arms.plan_arms", lambda planned, _: names.append(tuple(planned)) or {})
    command("--decode")
    command("--decode", "--model", "random:llama")
    assert names == [DEFAULT_FORMS, ("baseline", "oelm-freeze", "identity-key")]


def test_several_sizes_need_decode():
    result = command("multi-head", "--batch-size", "8,16")
    assert result.exit_code == 2
    assert "--batch-size 8,16" in result.stderr
    assert "--decode" in result.stderr
