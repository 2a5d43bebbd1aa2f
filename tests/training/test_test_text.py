"""Test text judges a language model once, at its end, document by document."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from oelm.analysis.load import load_run as load_record
from oelm.data import prepare, stories
from oelm.data.corpus.tokens import TokenDataset
from oelm.evaluation.load import load_run
from oelm.evaluation.use import evaluate_run
from oelm.training.tasks import text
from tests.support.training import config, run_here

LENGTH = 32


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Prepare stories with a test text of 12 of them."""
    folder = tmp_path_factory.mktemp("tokens")
    texts = list(stories(0, 60))
    for name, part in (("train", texts[:40]), ("val", texts[40:48]), ("test", texts[48:])):
        (folder / f"{name}.txt").write_text("".join(f"{text}\n<|endoftext|>\n" for text in part), encoding="utf-8")
    files = {name: folder / f"{name}.txt" for name in ("val", "test")}
    prepare(folder / "train.txt", folder / "out", train_bpe=300, workers=1, synthetic=True, **files)
    return folder / "out"


def changes(tokens) -> dict:
    return {"data": {"path": str(tokens), "sequence_length": LENGTH}, "train": {"max_steps": 4}}


@pytest.fixture(scope="module")
def trained(tokens, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    return run_here(folder, **changes(tokens)), config(folder, **changes(tokens)).folder


def by_document(run, data) -> tuple[list[float], list[int]]:
    """Return the summed loss and the number of targets of each document, window by window, in plain code."""
    model, text, eos = load_run(run).eval(), np.asarray(data.test.tokens).astype(np.int64), data.eos_id
    document_of = np.cumsum([0, *(text[:-1] == eos)])
    losses, counts = {}, {}
    for first in range(0, (len(text) - 1) // LENGTH * LENGTH, LENGTH):
        window = torch.from_numpy(text[first : first + LENGTH + 1])[None]
        with torch.no_grad():
            log_probabilities = F.log_softmax(model(input_ids=window[:, :-1]).logits[0].double(), -1)
        for place in range(1, LENGTH + 1):
            document = int(document_of[first + place])
            loss = -float(log_probabilities[place - 1, window[0, place]])
            losses[document] = losses.get(document, 0.0) + loss
            counts[document] = counts.get(document, 0) + 1
    return [losses[document] for document in sorted(losses)], [counts[document] for document in sorted(counts)]


def test_the_losses_of_every_document_are_recorded(trained, tokens):
    result, run = trained
    test = result["evaluations"]["test"]
    losses, counts = by_document(run, TokenDataset.open(tokens))
    assert len(losses) == 12
    assert test["document_tokens"] == counts
    assert test["document_losses"] == pytest.approx(losses, rel=1e-4)
    assert test["loss"] == pytest.approx(sum(losses) / sum(counts), rel=1e-4)
    assert test["perplexity"] == pytest.approx(np.exp(test["loss"]))
    for part, named in test["slices"].items():
        assert sum(row["tokens"] for row in named.values()) == sum(counts), part
        assert sum(row["loss"] * row["tokens"] for row in named.values()) == pytest.approx(sum(losses), rel=1e-4)
    assert test["step"] == result["best_step"], "the best model is judged, which the validation text chose"


def test_reports_and_eval_have_the_figures_of_the_test_text(trained):
    result, run = trained
    test = result["evaluations"]["test"]
    assert load_record(run).figure("test_perplexity") == test["perplexity"]
    again = evaluate_run(run, batch_size=3)["evaluations"]["test"]
    assert again["perplexity"] == pytest.approx(test["perplexity"], rel=1e-5)
    assert "document_losses" not in again


def test_a_text_of_many_documents_is_recorded_in_parts(tokens, tmp_path, monkeypatch):
    whole = run_here(tmp_path / "whole", **changes(tokens))["evaluations"]["test"]
    monkeypatch.setattr(text, "_MOST_PARTS", 5)
    parts = run_here(tmp_path / "parts", **changes(tokens))["evaluations"]["test"]
    assert len(parts["document_losses"]) == 5
    assert sum(parts["document_losses"]) == pytest.approx(sum(whole["document_losses"]), rel=1e-6)
    assert sum(parts["document_tokens"]) == sum(whole["document_tokens"])


def test_data_without_test_text_has_no_such_figures(tmp_path):
    assert run_here(tmp_path, train={"max_steps": 1})["evaluations"] == {}
