"""docs/attention.md: its configs cache what it says and are exact with a cache, and its pictures are up to date."""

import re
import runpy
from pathlib import Path

import pytest
import torch
import yaml

import oelm
from oelm.models.gpt import OelmGPTForCausalLM
from oelm.models.gpt_config import gpt_config

DOCS = Path(__file__).parents[3] / "docs"
GUIDE = (DOCS / "attention.md").read_text(encoding="utf-8")
CONFIGS = re.findall(r"^`(model\.name=gpt:.*?)` caches (\d+) numbers\.$", GUIDE, re.MULTILINE)


def build(settings):
    """Return the model that a line of settings names, with two layers and a small vocabulary."""
    values = dict(setting.split("=", 1) for setting in settings.split())
    size, method = values.pop("model.name").removeprefix("gpt:"), values.pop("method", None)
    fields = {name.removeprefix("model.fields."): yaml.safe_load(value) for name, value in values.items()}
    config = gpt_config(size, **fields, num_hidden_layers=2, vocab_size=64, max_position_embeddings=32)
    torch.manual_seed(0)
    model = OelmGPTForCausalLM(config).double().eval()
    if method:
        oelm.apply(model, method)
    return model


def test_every_config_of_the_guide_is_found():
    assert len(CONFIGS) == sum(line.startswith("`model.name=") for line in GUIDE.splitlines()) >= 14


@pytest.mark.parametrize(("settings", "numbers"), CONFIGS, ids=[settings for settings, _ in CONFIGS])
def test_a_config_caches_what_the_guide_says_and_is_exact(settings, numbers):
    model, ids = build(settings), torch.arange(12)[None] * 5 % 64
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        out = model(ids[:, :8], use_cache=True)
        parts = [out.logits]
        for place in range(8, 12):
            out = model(ids[:, place : place + 1], past_key_values=out.past_key_values)
            parts.append(out.logits)
    # An orthogonal key is computed in float32 before the model is cast, and values are as exact as it is orthogonal.
    tolerance = 1e-5 if model.config.orthogonal_key else 1e-9
    torch.testing.assert_close(torch.cat(parts, dim=1), whole, atol=tolerance, rtol=tolerance)
    layer = out.past_key_values.layers[0]
    assert layer.keys.numel() + layer.values.numel() == 12 * int(numbers)


def test_the_pictures_are_those_that_the_script_draws():
    draw = runpy.run_path(str(DOCS / "attention" / "draw.py"))
    drawn = {f"{name}.svg": draw["svg"](picture) for name, picture in draw["PICTURES"].items()}
    assert {path.name: path.read_text(encoding="utf-8") for path in (DOCS / "attention").glob("*.svg")} == drawn
    assert sorted(re.findall(r"\]\(attention/(.*?)\)", GUIDE)) == sorted(drawn)
