"""Published figures beside measured ones: the figures themselves, which runs replicate them, and the verdicts."""

import math

import pytest

from oelm.analysis import analyse
from oelm.errors import OelmError
from oelm.method.spec import PRESETS
from oelm.report.sections import published_section
from oelm.report.words import words
from oelm.runs import published
from tests.support.records import change, classification_run, language_run


def test_the_published_figures_are_those_of_the_study():
    known = published.load()
    expected = {
        "GPT-01": ("perplexity", 4.27),
        "GPT-02": ("perplexity", 4.69),
        "GPT-03": ("perplexity", 4.97),
        "GPT-04": ("perplexity", 47.24),
        "GPT-05": ("perplexity", 54.29),
        "GPT-06": ("perplexity", 25.13),
        "GPT-07": ("perplexity", 29.03),
        "XNLI-01": ("accuracy", 0.7671),
        "XNLI-02": ("accuracy", 0.7779),
        "SST-2-01": ("accuracy", 0.9312),
        "SST-2-02": ("accuracy", 0.9128),
        "SST-2-03": ("accuracy", 0.8211),
        "MNLI-01": ("accuracy", 0.8344),
        "MNLI-02": ("accuracy", 0.8223),
    }
    for name, (metric, value) in expected.items():
        assert known[name].figures[metric] == value
    assert {experiment.method for experiment in known.experiments.values()} <= set(PRESETS)
    assert all(
        known[experiment.against].dataset == experiment.dataset
        for experiment in known.experiments.values()
        if experiment.against
    )
    assert known["XNLI-02"].figures["step_seconds"] == 0.069
    assert known["GPT-07"].figures["val_loss"] == 3.368
    with pytest.raises(OelmError, match="GPT-01"):
        known["GPT-1"]


def test_early_perplexities_are_those_of_the_pair_that_they_were_measured_on():
    """They belong to groups A and B, which ended at 4.14 and 4.66, and not to GPT-01 and GPT-02."""
    known = published.load()
    early = ["perplexity", "perplexity_at_step_1000", "perplexity_at_step_3000"]
    assert [known["GPT-GLOBAL-01"].figures[name] for name in early] == [4.14, 41.41, 10.82]
    assert [known["GPT-GLOBAL-03"].figures[name] for name in early] == [4.66, 46.04, 13.54]
    assert not set(early[1:]) & {*known["GPT-01"].figures, *known["GPT-02"].figures}
    rates = [known[name].setup["optimizer.learning_rate"]["reports"] for name in ("GPT-GLOBAL-01", "GPT-GLOBAL-03")]
    assert rates == [3e-4, 3e-4]


def test_every_figure_has_its_source_and_settings_that_sources_disagree_on_have_all_values():
    known = published.load()
    for experiment in known.experiments.values():
        assert set(experiment.sources) == {*experiment.figures, *experiment.ratios}
        assert not set(experiment.figures) & set(experiment.ratios)
    for name in ("GPT-04", "GPT-05"):
        assert known[name].setup["train.max_steps"] == {"reports": 100_000, "scripts": 150_000}
    assert known["GPT-05"].sources["perplexity"] == "the original study's reports"
    assert "Starryyu77" in known["GPT-05"].sources["seconds"]
    assert (known["SST-2-02"].ratios, known["MNLI-02"].ratios) == ({"seconds": 0.43}, {"seconds": 0.43})


def replications_of(folder):
    """Return the comparisons of the runs in a folder with published figures, by experiment and metric."""
    return {
        (replication.experiment.id, replication.metric): replication for replication in analyse([folder]).replications
    }


def test_published_figures_are_matched_by_id_or_by_data_and_stand_in_data_is_flagged(tmp_path):
    books = "old novels, a stand-in for OpenWebText"
    for seed, noise in enumerate((0.0, 0.004, -0.003)):
        language_run(tmp_path, "baseline", seed, 3.8 + noise, description=books)
        language_run(tmp_path, "oelm-freeze", seed, 3.8 + math.log(54.29 / 47.24) + 2 * noise, description=books)
        named = {"experiment": "GPT-06-lr-1e-3"}
        language_run(tmp_path, "baseline", seed, 3.2 + noise, description="my wiki", changes=named)
    replications = replications_of(tmp_path)
    assert {experiment for experiment, _ in replications} == {"GPT-04", "GPT-05", "GPT-06"}
    effect = replications["GPT-05", "perplexity"]
    assert (effect.verdict, effect.stand_in) == ("agrees", True)
    assert effect.published_change == pytest.approx(0.149, abs=0.001)
    assert {"train.max_steps", "hardware", "vocabulary"} <= {item.field for item in effect.differs}
    assert replications["GPT-04", "perplexity"].verdict == "not-judged"
    assert not replications["GPT-06", "perplexity"].stand_in


def test_runs_on_synthetic_data_do_not_judge_a_published_figure(tmp_path):
    """A result on synthetic text neither agrees with the study nor differs from it."""
    smoke, synthetic = {"experiment": "GPT-02-smoke"}, {"data": {"synthetic": True}}
    for seed, noise in enumerate((0.0, 0.004, -0.003)):
        for method, gap in (("baseline", 0.0), ("oelm-freeze", math.log(4.69 / 4.27) + noise)):
            language_run(tmp_path, method, seed, 3.0 + noise + gap, changes=smoke, environment=synthetic)
    replications = replications_of(tmp_path)
    effect = replications["GPT-02", "perplexity"]
    assert effect.measured_change.low < effect.published_change < effect.measured_change.high
    assert {replication.verdict for replication in replications.values()} == {"not-judged"}
    assert not effect.stand_in, "synthetic text stands in for nothing"


def test_a_published_effect_outside_the_interval_differs_and_one_seed_decides_nothing(tmp_path):
    for seed, noise in enumerate((0.0, 0.002, -0.001)):
        classification_run(tmp_path / "three", "baseline", seed, 0.93 + noise)
        classification_run(tmp_path / "three", "oelm-freeze", seed, 0.95 + 2 * noise)
    classification_run(tmp_path / "one", "baseline", 0, 0.93)
    classification_run(tmp_path / "one", "oelm-freeze", 0, 0.95)
    three_seeds = replications_of(tmp_path / "three")["SST-2-02", "accuracy"]
    one_seed = replications_of(tmp_path / "one")["SST-2-02", "accuracy"]
    assert (three_seeds.verdict, one_seed.verdict) == ("differs", "undecided")


def test_a_published_effect_inside_a_very_wide_interval_is_undecided(tmp_path):
    """Two seeds that differ widely give an interval from -100 % to millions of percent, which contains any value."""
    for seed, gap in enumerate((-0.9, 1.6)):
        language_run(tmp_path, "baseline", seed, 3.8, changes={"experiment": "GPT-04"})
        language_run(tmp_path, "oelm-freeze", seed, 3.8 + gap, changes={"experiment": "GPT-05"})
    replications = replications_of(tmp_path)
    effect = replications["GPT-05", "perplexity"]
    assert effect.measured_change.low < effect.published_change < effect.measured_change.high
    assert effect.verdict == "undecided"


def test_runs_of_a_named_experiment_find_the_rows_that_it_repeats(tmp_path):
    """GPT-GLOBAL repeats three rows and is named as none of them; its baseline is not that of GPT-01."""
    for seed in (0, 1):
        for method in ("baseline", "oelm-nofreeze", "oelm-global", "oelm-freeze"):
            named = {"experiment": "GPT-GLOBAL"}
            language_run(tmp_path / "global", method, seed, 1.5 + seed / 100, description="TinyStories", changes=named)
        for method in ("baseline", "oelm-freeze"):
            named = {"experiment": "GPT-IMDB-smoke-lr-1e-3", "model": {"name": "gpt:tiny"}}
            classification_run(tmp_path / "imdb", method, seed, 0.8, task="builtin:sentiment", changes=named)
    assert {id for id, _ in replications_of(tmp_path / "global")} == {f"GPT-GLOBAL-0{n}" for n in (1, 2, 3)}
    assert {id for id, _ in replications_of(tmp_path / "imdb")} == {"GPT-IMDB-01", "GPT-IMDB-02"}


def test_a_row_is_found_by_any_run_of_an_arm(tmp_path):
    """The folder of another experiment with the same settings may come first."""
    for seed, name in enumerate(("A-first", "GPT-06", "GPT-06")):
        language_run(tmp_path, "baseline", seed, 3.2, changes={"experiment": name})
    assert len(replications_of(tmp_path)["GPT-06", "perplexity"].runs) == 3


def test_a_row_is_found_where_its_run_equals_one_of_another_experiment(tmp_path):
    """GPT-01 and the baseline of GPT-GLOBAL are one run, which is counted once, under the name that comes first."""
    for name, method in (("GPT-01", "baseline"), ("GPT-GLOBAL", "baseline"), ("GPT-GLOBAL", "oelm-global")):
        language_run(tmp_path, method, 0, 1.5, changes={"experiment": name})
    assert {id for id, _ in replications_of(tmp_path)} == {"GPT-01", "GPT-GLOBAL-01", "GPT-GLOBAL-02"}


def test_a_row_is_found_where_the_folder_of_its_run_comes_last(tmp_path):
    """The groups' baseline is counted, GPT-01 is not, and no other run of the setup has its name."""
    for folder, name, method in (("a", "ABC-tinystories", "baseline"), ("b", "GPT-01", "baseline")):
        language_run(tmp_path / folder, method, 0, 1.5, changes={"experiment": name})
    language_run(tmp_path / "a", "oelm-nofreeze", 0, 1.5, changes={"experiment": "ABC-tinystories"})
    replications = replications_of(tmp_path)
    assert {id for id, _ in replications} == {"GPT-01", "ABC-01", "ABC-02"}
    assert replications["GPT-01", "perplexity"].runs == replications["ABC-01", "perplexity"].runs


def test_runs_on_xnli_are_not_compared_with_figures_of_mnli(tmp_path):
    about = "XNLI (en), trained on MNLI"
    for task in ("xnli", "mnli"):
        folder = classification_run(tmp_path / task, "baseline", task=task)
        change(folder, "environment.json", data={"description": about, "synthetic": False, "splits": {}})
    assert replications_of(tmp_path / "xnli") == {}, "XNLI-01 is another method"
    assert {id for id, _ in replications_of(tmp_path / "mnli")} == {"MNLI-01"}


def test_a_setting_that_sources_disagree_on_differs_from_neither(tmp_path):
    def steps_differ(steps):
        folder = tmp_path / str(steps)
        language_run(folder, "baseline", 0, 3.8, steps=steps, changes={"experiment": "GPT-04"})
        differs = replications_of(folder)["GPT-04", "perplexity"].differs
        return [item.one for item in differs if item.field == "train.max_steps"]

    assert steps_differ(100_000) == steps_differ(150_000) == []
    assert steps_differ(400) == ["100,000 (reports) / 150,000 (scripts)"]


def test_numbers_of_parameters_are_judged_where_the_model_is_the_same(tmp_path):
    """The reports give 82 M for this GPT, and for the same one as group A 44,896,768."""
    for name, total in (("GPT-01", 44_896_768), ("GPT-GLOBAL", 44_896_770)):
        medium = {"experiment": name, "model": {"name": "gpt:medium-512"}}
        data = {"data": {"vocab_size": 50257}}
        folder = language_run(tmp_path / name, "baseline", 0, 1.5, changes=medium, environment=data)
        counts = {"total": total, "trainable": total, "frozen": 0, "frozen_share": 0.0, "buffers": 0}
        change(folder, "result.json", parameters=counts)
    assert replications_of(tmp_path / "GPT-01")["GPT-01", "trainable"].verdict == "differs"
    assert replications_of(tmp_path / "GPT-GLOBAL")["GPT-GLOBAL-01", "trainable"].verdict == "agrees"
    language_run(tmp_path / "tiny", "baseline", 0, 1.5, changes={"experiment": "GPT-01"})
    assert ("GPT-01", "trainable") not in replications_of(tmp_path / "tiny"), "the number says nothing of another model"


def test_a_change_that_was_published_without_values_is_compared(tmp_path):
    for seed, noise in enumerate((0.0, 0.002, -0.001)):
        for method, accuracy, seconds in (("baseline", 0.93, 100.0), ("oelm-freeze", 0.91, 98.0)):
            folder = classification_run(tmp_path, method, seed, accuracy + noise)
            change(folder, "result.json", seconds=seconds + 100 * noise * (accuracy - 0.9))
    time = replications_of(tmp_path)["SST-2-02", "seconds"]
    assert (time.value, time.verdict) == (None, "differs")
    assert time.published_change == pytest.approx(-0.57)
    assert time.measured_change.mean == pytest.approx(-0.02, abs=0.001)
    table = published_section(analyse([tmp_path]), words("en"))[1]
    (row,) = [row for row in table.rows if (row[0].text, row[2].text) == ("SST-2-02", "training time")]
    assert (row[3].text, row[5].text) == ("–", "−57.0 %")
