"""Intervals over the documents of the test text."""

import json
import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from oelm.analysis import analyse
from oelm.analysis.stats import cluster_bootstrap
from oelm.report.write import write_report
from tests.support.records import change, language_run

TOKENS = [100 + 10 * number for number in range(40)]


def judged_study(root, gap=0.1, documents=40, seeds=3):
    """Write two arms whose test losses differ by `gap` per token on average, more on some documents than on others."""
    rng, tokens = np.random.default_rng(0), np.array(TOKENS[:documents])
    hardness, cost = rng.normal(3.2, 0.3, documents), rng.normal(gap, 0.05, documents)
    for seed in range(seeds):
        for method, extra in (("baseline", 0.0), ("oelm-freeze", cost)):
            losses = tokens * (hardness + extra + rng.normal(0, 0.004))
            loss = losses.sum() / tokens.sum()
            folder = language_run(root, method, seed, loss - 0.05)
            step = json.loads((folder / "result.json").read_text())["steps"]
            test = {"step": step, "loss": loss, "perplexity": math.exp(loss)}
            by_document = {"document_losses": losses.tolist(), "document_tokens": tokens.tolist()}
            change(folder, "result.json", evaluations={"test": {**test, **by_document}})
    return root


def test_the_cluster_bootstrap_is_that_of_scipy():
    rng = np.random.default_rng(1)
    sums, sizes = rng.normal(5, 2, 60), rng.integers(10, 100, 60)
    own = cluster_bootstrap(sums, sizes.tolist())

    def ratio(total, count, axis):
        return total.sum(axis=axis) / count.sum(axis=axis)

    options = {"paired": True, "method": "percentile", "n_resamples": 20_000, "rng": np.random.default_rng(2)}
    expected = scipy_stats.bootstrap((sums, sizes), ratio, **options).confidence_interval
    width = expected.high - expected.low
    assert own == pytest.approx((expected.low, expected.high), abs=0.07 * width)
    assert own == cluster_bootstrap(sums, sizes.tolist())


def test_runs_are_compared_on_the_test_text_with_an_interval_over_its_documents(tmp_path):
    analysis = analyse([judged_study(tmp_path)])
    (judged,) = analysis.judged
    (chosen,) = analysis.comparisons
    assert (judged.measure.name, judged.pairs, judged.rate) == ("test_perplexity", chosen.pairs, chosen.rate)
    assert judged.adjusted is not None
    low, high = judged.over_texts
    assert low < judged.change.mean < high
    # 40 documents whose costs spread by 0.05: the mean of such a sample spreads by 0.05 / sqrt(40).
    assert high - low == pytest.approx(2 * 1.96 * 0.05 / math.sqrt(40) * judged.ratio.mean, rel=0.35)
    assert chosen.over_texts is None


@pytest.mark.parametrize("documents", [9, 10])
def test_few_documents_have_no_interval(tmp_path, documents):
    (judged,) = analyse([judged_study(tmp_path, documents=documents)]).judged
    assert (judged.over_texts is None) is (documents < 10)


def test_runs_on_other_documents_have_no_interval(tmp_path):
    judged_study(tmp_path)
    folder = next(tmp_path.rglob("oelm-freeze/seed-1"))
    evaluations = json.loads((folder / "result.json").read_text())["evaluations"]
    evaluations["test"]["document_tokens"][0] += 1
    change(folder, "result.json", evaluations=evaluations)
    (judged,) = analyse([tmp_path]).judged
    assert judged.n == 3
    assert judged.over_texts is None


def test_a_report_has_both_intervals(tmp_path):
    write_report([judged_study(tmp_path / "runs")], tmp_path / "out", formats=("md",))
    text = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "over texts" in text
    assert "whole documents" in text
    content = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    (judged,) = content["on_test_text"]
    assert judged["over_texts"][0] < judged["ratio"]["mean"] - 1 < judged["over_texts"][1]
