"""The model card of an export: valid for the Hub, true to the model and its run, and pushed with it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from huggingface_hub import ModelCard

import oelm
from oelm.models.card import CARD, Figure, Training
from tests.support.hub import local_hub
from tests.support.models import model_with_method

TRAINING = Training(
    task="folder",
    data="reviews | of <b>films</b>; rows: 90 train, 10 validation",
    base="owner/base",
    settings=(("seed", "0"),),
    figures=(Figure(split="validation", metric="accuracy", value=0.75),),
    notes=("a note with a | and a\nline break",),
)


def _card(folder):
    return ModelCard.load(folder / CARD)


def test_a_card_says_what_was_frozen(tmp_path):
    model = model_with_method("bert", "oelm-freeze")
    card = _card(oelm.export(model, tmp_path))
    assert card.data.to_dict() == {
        "library_name": "transformers",
        "pipeline_tag": "text-classification",
        "tags": ["oelm"],
    }
    assert "the method `oelm-freeze` (seed 0)" in card.text
    assert str(oelm.audit(model)) in card.text
    assert "AutoModelForSequenceClassification.from_pretrained" in card.text
    assert "No record of its training" in card.text


def test_a_card_has_a_runs_settings_and_figures(tmp_path):
    card = _card(oelm.export(model_with_method("gpt2"), tmp_path, training=TRAINING))
    assert card.data.base_model == "owner/base"
    (result,) = card.data.eval_results
    assert (result.task_type, result.dataset_type, result.dataset_split) == ("text-generation", "folder", "validation")
    assert (result.metric_type, result.metric_value) == ("accuracy", 0.75)
    assert "\n| validation | accuracy | 0.75 |\n" in card.text
    assert "\n- a note with a \\| and a line break\n" in card.text
    assert "<b>" not in card.text


def test_a_card_names_the_class_that_was_written_and_a_custom_method_in_full(tmp_path):
    card = _card(oelm.export(model_with_method("oelm-gpt", {"preset": "identity-key", "layers": "last:1"}), tmp_path))
    assert "# GPT2LMHeadModel\n" in card.text
    assert '"layers":"last:1"' in card.text


def test_a_model_without_a_method_has_nothing_frozen_in_its_card(tmp_path):
    model = model_with_method("bert")
    plain = type(model).from_pretrained(oelm.export(model, tmp_path / "one"))
    assert "Nothing: no method was applied" in _card(oelm.export(plain, tmp_path / "two")).text


def test_a_card_that_is_there_is_kept(tmp_path):
    (tmp_path / CARD).write_text("mine")
    oelm.export(model_with_method("bert"), tmp_path)
    assert (tmp_path / CARD).read_text() == "mine"


_PUSH = """
import sys
from huggingface_hub import HfApi, ModelCard
from transformers import AutoModelForSequenceClassification
import oelm
folder = sys.argv[1]
api = HfApi(token="hf_local")
api.create_repo("me/plain")
api.upload_folder(repo_id="me/plain", folder_path=folder)
loaded, info = AutoModelForSequenceClassification.from_pretrained("me/plain", output_loading_info=True)
assert not any(info.values()), info
card = ModelCard.load("me/plain").text
loaded.push_to_hub("me/plain", token="hf_local")  # transformers keeps the card that is there
assert ModelCard.load("me/plain").text == card
loaded.push_to_hub("me/again", token="hf_local")
oelm.apply(loaded, "oelm-freeze")
oelm.export(loaded, "direct", push_to_hub=True, repo_id="me/direct", token="hf_local", commit_message="first")
oelm.export(loaded, "unnamed", push_to_hub=True, token="hf_local")
"""


@pytest.mark.full
def test_an_exported_folder_is_pushed_with_its_card_and_loaded_again(tmp_path):
    """By the upload of the folder, by transformers, and by export itself."""
    folder = oelm.export(model_with_method("bert"), tmp_path / "plain", training=TRAINING)
    with local_hub() as hub:
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": hub.url,
            "HF_HOME": str(tmp_path / "home"),
            "HF_HUB_DISABLE_TELEMETRY": "1",
            "HF_HUB_DISABLE_XET": "1",
        }
        command = [sys.executable, "-c", _PUSH, str(folder)]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        pushed, again = hub.repositories["me/plain"], hub.repositories["me/again"]
    assert hub.objects, "weights went through LFS, as they do on the Hub"
    assert set(pushed) == {path.name for path in folder.iterdir()}
    assert pushed[CARD] == (folder / CARD).read_bytes()
    assert pushed["model.safetensors"] == (folder / "model.safetensors").read_bytes()
    assert again["model.safetensors"] == pushed["model.safetensors"]
    for name, repository in (("direct", "me/direct"), ("unnamed", "me/unnamed")):
        written = {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        assert hub.repositories[repository] == written, "the card is oelm's, not the one that transformers makes"
        assert b"## What was frozen" in written[CARD]
