"""Runs of chosen folders against others: which of them count, how they are paired, and what confounds them."""

import pytest

from oelm.analysis import AnalysisError, analyse
from oelm.analysis.arms import MEASURES
from oelm.analysis.compare import of_pairs
from oelm.analysis.contrast import choose_runs, contrast, learned_at, other_differences
from oelm.analysis.load import load_run
from oelm.analysis.slices import has_slices
from tests.support.records import add_slices, language_run, probe_run, write_status


def language(root, seed=0, loss=3.0, **model):
    return language_run(root, "baseline", seed, loss, changes={"model": {"fields": model}})


def chosen(name, *folders, suitable=lambda run: True):
    return choose_runs(name, list(folders), suitable)


def test_forms_are_compared_by_seed_and_are_no_confound(tmp_path):
    for seed in range(3):
        language(tmp_path / "plain", seed, 3.0)
        language(tmp_path / "offset", seed, 3.1 + 0.01 * seed, key_offset=0.5)
    language(tmp_path / "offset", 3, 9.0, key_offset=0.5)
    comparison = contrast(chosen("offset", tmp_path / "offset"), chosen("plain", tmp_path / "plain"))
    assert (comparison.arm, comparison.reference, comparison.n) == ("offset", "plain", 3)
    assert comparison.confounds == ()
    assert comparison.log_ratio.mean == pytest.approx(0.11)
    assert of_pairs(comparison, MEASURES["val_loss"]).difference.mean == pytest.approx(0.11)


def test_what_else_differs_is_named(tmp_path):
    plain = language(tmp_path / "plain")
    longer = language_run(
        tmp_path / "longer", "oelm-freeze", 0, 3.1, changes={"model": {"fields": {"key_offset": 0.5}}}, steps=800
    )
    comparison = contrast(chosen("longer", tmp_path / "longer"), chosen("plain", tmp_path / "plain"))
    fields = {item.field for item in comparison.confounds}
    assert "train.max_steps" in fields
    assert not any(field.startswith(("model.fields", "method")) for field in fields)
    assert fields == {item.field for item in other_differences(load_run(longer), load_run(plain))}


def test_runs_of_no_seed_in_common_are_not_compared(tmp_path):
    language(tmp_path / "plain", 0)
    language(tmp_path / "offset", 1, key_offset=0.5)
    assert contrast(chosen("offset", tmp_path / "offset"), chosen("plain", tmp_path / "plain")) is None


def test_of_each_seed_the_first_suitable_run_counts(tmp_path):
    """The same run, made again with slices in another run set, is not lost as a repeat of the first."""
    language(tmp_path / "old", 0, 3.0)
    add_slices(language(tmp_path / "new", 0, 3.0), 2.0, 3.25)
    folders = tmp_path / "old", tmp_path / "new"
    assert [run.path.parts[-4] for run in chosen("plain", *folders).runs] == ["old"]
    assert [run.path.parts[-4] for run in chosen("plain", *reversed(folders)).runs] == ["new"]
    with_slices = chosen("plain", *folders, suitable=lambda run: has_slices(run, "validation"))
    assert [run.path.parts[-4] for run in with_slices.runs] == ["new"]
    assert with_slices.unsuitable == 1
    assert chosen("plain") == chosen("plain", suitable=lambda run: False)


def test_several_learning_rates_are_refused(tmp_path):
    language_run(tmp_path, "baseline", 0, 3.0, 1e-3)
    language_run(tmp_path, "baseline", 1, 3.0, 2e-3)
    with pytest.raises(AnalysisError, match=r"plain: its runs have several learning rates \(0.001, 0.002\)"):
        chosen("plain", tmp_path)


def test_a_seed_that_failed_confounds(tmp_path):
    for seed in range(2):
        language(tmp_path / "plain", seed)
        folder = language(tmp_path / "offset", seed, key_offset=0.5)
    (folder / "result.json").unlink()
    write_status(folder, "failed", message="no")
    comparison = contrast(chosen("offset", tmp_path / "offset"), chosen("plain", tmp_path / "plain"))
    assert [item.field for item in comparison.confounds] == ["seeds that failed"]


def test_the_seeds_of_a_generated_task_are_pairs_although_each_has_sequences_of_its_own(tmp_path):
    for seed in range(3):
        for method, share in (("baseline", 0.3 + 0.01 * seed), ("oelm-freeze", 0.5)):
            probe_run(tmp_path, "plain", "recall", seed, {100: share}, method)
    (comparison,) = analyse([tmp_path]).comparisons
    assert (comparison.n, comparison.confounds) == (3, ())
    assert comparison.setup.dataset == "generated sequences of 64 tokens: recall"


def test_a_task_is_learned_at_the_first_validation_that_is_nearly_all_right(tmp_path):
    def run(seed, shares):
        return load_run(probe_run(tmp_path, "plain", "recall", seed, shares))

    assert learned_at(run(0, {100: 0.3, 200: 0.9, 300: 0.8})) == 200
    assert learned_at(run(1, {100: 0.3, 200: 0.89})) is None
