"""Hypotheses: rules, verdicts, scenarios, files of hypotheses, and malformed files."""

import math

import numpy as np
import pytest
import yaml

from oelm.analysis import AnalysisError, analyse
from oelm.analysis.hypotheses import decide, load_hypotheses
from oelm.report import summary
from tests.support.records import change, classification_run, language_run

NOISE = (0.0, 0.004, -0.003)


def verdicts(path, hypotheses=None):
    """Return the verdicts on the runs in a folder, by hypothesis; a file may add hypotheses."""
    return {verdict.hypothesis.id: verdict for verdict in analyse([path], hypotheses).verdicts}


def arms(path, **gaps):
    """Write a baseline with a loss of 3 and other arms above it by their gaps, with three seeds each."""
    for seed, noise in enumerate(NOISE):
        language_run(path, "baseline", seed, 3.0 + noise)
        for noise_factor, (method, gap) in enumerate(gaps.items(), start=2):
            loss = 3.0 + gap + noise_factor * noise
            language_run(path, method.replace("_", "-"), seed, loss, step_seconds=0.02 + noise / 100)
    return path


def test_a_loss_of_two_percent_is_within_the_target_and_one_of_twenty_is_not(tmp_path):
    near = verdicts(arms(tmp_path / "near", oelm_freeze=math.log(1.02)))
    far = verdicts(arms(tmp_path / "far", oelm_freeze=math.log(1.2)))
    assert (near["H4"].verdict, near["TARGET-LOSS"].verdict) == ("supported", "supported")
    assert (far["H4"].verdict, far["TARGET-LOSS"].verdict) == ("refuted", "refuted")
    assert far["H4"].estimate.mean == pytest.approx(0.2, abs=0.001)
    assert near["H2"].verdict == "undecided"
    assert near["H2"].notes[0].code == "no_runs"


def test_an_interval_that_contains_the_bound_decides_nothing(tmp_path):
    for seed, noise in enumerate((0.0, 0.08, -0.07)):
        language_run(tmp_path, "baseline", seed, 3.0)
        language_run(tmp_path, "oelm-freeze", seed, 3.0 + math.log(1.10) + noise)
    assert verdicts(tmp_path)["H4"].verdict == "undecided"


@pytest.mark.parametrize(
    ("gap", "scenario", "expected"),
    [(-0.1, "better", "refuted"), (0.01, "like", "supported"), (0.2, "worse", "refuted")],
)
def test_the_scenario_follows_from_freeze_against_no_freeze(tmp_path, gap, scenario, expected):
    verdict = verdicts(arms(tmp_path, oelm_nofreeze=0.0, oelm_freeze=gap))["H2"]
    assert (verdict.scenario, verdict.verdict) == (scenario, expected)


def test_an_undecided_verdict_selects_no_scenario(tmp_path):
    """Alone, freeze is significantly worse than no-freeze; corrected for the other hypotheses it is not."""
    for seed, noise in enumerate((0.0, 0.05, -0.04)):
        language_run(tmp_path, "baseline", seed, 3.0)
        language_run(tmp_path, "oelm-nofreeze", seed, 3.0)
        language_run(tmp_path, "oelm-freeze", seed, 3.2 + noise)
    verdict = verdicts(tmp_path)["H2"]
    assert verdict.p < 0.05 <= verdict.adjusted
    assert (verdict.verdict, verdict.towards, verdict.scenario) == ("undecided", "refuted", None)


def test_runs_of_other_setups_do_not_change_a_verdict(tmp_path):
    """The tests of a setup are corrected over what was declared for it, not over what else is in the folder."""
    alone = verdicts(arms(tmp_path / "a", oelm_nofreeze=0.01, oelm_freeze=math.log(1.15)))
    for fraction in (0.1, 0.2):
        for seed, noise in enumerate(NOISE):
            for method in ("baseline", "oelm-nofreeze", "oelm-freeze", "oelm-random-matched"):
                options = {"changes": {"data": {"fraction": fraction}}}
                language_run(tmp_path / f"b-{fraction}", method, seed, 3.0 + len(method) * noise, **options)
    both = [verdict for verdict in analyse([tmp_path]).verdicts if verdict.setup is not None and verdict.p is not None]
    assert len(both) > 10
    for id in ("H2", "H4", "TARGET-LOSS"):
        (same,) = [verdict for verdict in both if verdict.hypothesis.id == id and "/a/" in str(verdict.runs[0].path)]
        assert (same.verdict, same.adjusted) == (alone[id].verdict, alone[id].adjusted) != ("undecided", None)


def test_another_arm_of_a_setup_takes_no_verdict_away(tmp_path):
    arms(tmp_path, oelm_nofreeze=0.01, oelm_freeze=math.log(1.17))
    before = verdicts(tmp_path)
    for seed, noise in enumerate(NOISE):
        language_run(tmp_path, "oelm-random-matched", seed, 3.2 + 5 * noise)
    after = verdicts(tmp_path)
    assert after["ORTHOGONAL"].p is not None
    for id in ("H2", "H4", "TARGET-LOSS"):
        assert before[id].verdict == after[id].verdict == "refuted"
        assert after[id].adjusted <= before[id].adjusted


def test_counts_are_judged_without_a_significance_test_and_shown_beside_another_measure(tmp_path):
    claim = {"id": "MINE", "title": "40,000 are frozen", "arm": "oelm-freeze", "measure": "frozen", "compare": "value"}
    beside = {"measure": "frozen_share", "expected": 0.15}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump([{**claim, "rule": {"above": 40_000}, "beside": beside}]))
    verdict = verdicts(arms(tmp_path / "runs", oelm_freeze=0.1), tmp_path / "mine.yaml")["MINE"]
    assert (verdict.verdict, verdict.p) == ("refuted", None)
    assert verdict.estimate.mean == 2 * 4 * 64 * 64
    assert verdict.beside == pytest.approx(32768 / (4 * (4 * 64 * 64 + 2 * 64 * 256) + 100_000))


@pytest.mark.parametrize(("bound", "expected"), [(-0.05, "supported"), (-0.5, "refuted")])
def test_counts_of_two_arms_are_compared_without_a_significance_test(tmp_path, bound, expected):
    """The number of trained parameters does not depend on the seed, so equal differences are expected."""
    claim = {"id": "MINE", "title": "fewer are trained", "arm": "oelm-freeze", "against": "baseline"}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump([{**claim, "measure": "trainable", "rule": {"below": bound}}]))
    verdict = verdicts(arms(tmp_path / "runs", oelm_freeze=0.1), tmp_path / "mine.yaml")["MINE"]
    assert (verdict.verdict, verdict.p, verdict.notes) == (expected, None, ())


def test_a_hypothesis_about_one_model_is_not_judged_on_another(tmp_path):
    """More than 3 million frozen parameters are a claim about medium-512, not about an encoder of the same size."""
    counts = {"total": 22_713_216, "trainable": 20_939_136, "frozen": 1_774_080, "buffers": 0}
    for method in ("baseline", "oelm-freeze"):
        folder = classification_run(tmp_path / "minilm", method, changes={"model": {"name": "minilm"}})
        change(folder, "result.json", parameters={**counts, "frozen_share": 0.078})
    analysis = analyse([tmp_path])
    verdict = next(verdict for verdict in analysis.verdicts if verdict.hypothesis.id == "H1")
    assert (verdict.verdict, verdict.notes[0].code, verdict.estimate) == ("undecided", "other_model", None)
    assert not any("H1" in line for line in summary(analysis))
    for method in ("baseline", "oelm-freeze"):
        language_run(tmp_path / "gpt", method, 0, 3.0, changes={"model": {"name": "gpt:medium-512"}})
    (judged,) = [verdict for verdict in analyse([tmp_path]).verdicts if verdict.hypothesis.id == "H1"]
    assert (judged.verdict, {run.config.model.name for run in judged.runs}) == ("refuted", {"gpt:medium-512"})


def test_steps_per_hour_are_compared_where_times_are_comparable(tmp_path):
    for seed, noise in enumerate((0.0, 1e-5, -1e-5)):
        language_run(tmp_path, "oelm-nofreeze", seed, 3.0, step_seconds=0.020 + noise)
        language_run(tmp_path, "oelm-freeze", seed, 3.1 + noise, step_seconds=0.019 - noise)
    assert verdicts(tmp_path)["H3"].verdict == "supported"


def test_the_value_of_orthogonality_is_judged_against_matched_random(tmp_path):
    alone = verdicts(arms(tmp_path / "alone", oelm_freeze=0.1, oelm_random=0.3))
    assert (
        alone["ORTHOGONAL"].notes[0].code == "no_runs"
    )  # rows of oelm-random are shorter, so it is no control for orthogonality
    both = verdicts(arms(tmp_path / "both", oelm_freeze=0.1, oelm_random_matched=0.1))
    assert both["ORTHOGONAL"].verdict == "undecided"


def test_orthogonality_is_not_judged_on_pretrained_models(tmp_path):
    for seed, noise in enumerate(NOISE):
        for method, accuracy in (("oelm-freeze", 0.9), ("oelm-random-matched", 0.7)):
            classification_run(tmp_path / "one", method, seed, accuracy + noise)
        classification_run(tmp_path / "two", "oelm-random-matched", seed, 0.7 + noise)
        classification_run(tmp_path / "two", "oelm-random-orthogonal", seed, 0.7 + 1.1 * noise)
    assert verdicts(tmp_path / "one")["ORTHOGONAL-ACC"].notes[0].code == "no_runs"
    assert verdicts(tmp_path / "two")["ORTHOGONAL-ACC"].verdict == "undecided"
    for seed, noise in enumerate(NOISE):
        for method, loss in (("oelm-freeze", 3.0), ("oelm-random-matched", 4.0)):
            language_run(tmp_path / "gpt2", method, seed, loss + noise, changes={"model": {"name": "gpt2"}})
    assert verdicts(tmp_path / "gpt2")["ORTHOGONAL"].notes[0].code == "pretrained"


def test_classifiers_are_judged_by_accuracy(tmp_path):
    for seed, noise in enumerate(NOISE):
        classification_run(tmp_path, "baseline", seed, 0.93 + noise)
        classification_run(tmp_path, "oelm-freeze", seed, 0.928 + 1.2 * noise)
    judged = verdicts(tmp_path)
    assert judged["KEEPS-98"].verdict == "supported"
    assert judged["H4"].notes[0].code == "no_runs"


def test_a_relative_change_is_not_computed_from_an_accuracy_of_zero(tmp_path):
    for seed, accuracy in enumerate((0.0, 0.9)):
        classification_run(tmp_path, "baseline", seed, 0.9 + 0.01 * seed)
        classification_run(tmp_path, "oelm-freeze", seed, accuracy)
    verdict = verdicts(tmp_path)["KEEPS-98"]
    assert (verdict.verdict, verdict.notes[0].code) == ("undecided", "no_ratio")


def test_a_trend_needs_three_data_sets_and_a_slope(tmp_path):
    def dataset(name, tokens, gap):
        for seed, noise in enumerate(NOISE):
            data = {"data": {"splits": {"train": {"tokens": tokens, "sha256": name * 8}}}}
            language_run(tmp_path / name, "baseline", seed, 3.0 + noise, description=name, environment=data)
            language_run(tmp_path / name, "oelm-freeze", seed, 3.0 + gap + noise, description=name, environment=data)

    dataset("small", 10**6, 0.05)
    dataset("middle", 8 * 10**6, 0.11)
    verdict = verdicts(tmp_path)["TREND"]
    assert (verdict.verdict, verdict.notes[0].code) == ("undecided", "few_datasets")
    dataset("large", 64 * 10**6, 0.17)
    dataset("huge", 512 * 10**6, 0.2301)
    verdict = verdicts(tmp_path)["TREND"]
    assert verdict.verdict == "supported"
    assert verdict.estimate.mean == pytest.approx(0.02, rel=0.02)  # per doubling


def test_a_trend_is_tested_against_the_bound_of_its_rule(tmp_path):
    """The change grows by 2 % per doubling with a narrow interval: the sign alone does not decide other bounds."""
    for size, gap in ((1, 0.05), (8, 0.11), (64, 0.17), (512, 0.2301)):
        data = {"data": {"splits": {"train": {"tokens": size * 10**6, "sha256": str(size) * 8}}}}
        for method, loss in (("baseline", 3.0), ("oelm-freeze", 3.0 + gap)):
            language_run(tmp_path / "runs" / f"{size}", method, 0, loss, description=f"{size}", environment=data)
    rules = {
        "supported": [{"above": 0.01}, {"below": 0.5}, {"at_least": 0.01}, {"at_most": 0.03}, {"within": 0.03}],
        "refuted": [{"above": 0.5}, {"below": 0.01}, {"at_least": 0.03}, {"at_most": 0.01}, {"within": 0.001}],
        "undecided": [{"above": 0.02}, {"within": 0.02}],
    }
    claim = {"title": "a trend", "arm": "oelm-freeze", "against": "baseline", "measure": "perplexity"}
    hypotheses = [
        {**claim, "id": f"{verdict}-{index}", "compare": "trend", "rule": rule}
        for verdict, rules_with_verdict in rules.items()
        for index, rule in enumerate(rules_with_verdict)
    ]
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(hypotheses))
    judged = verdicts(tmp_path / "runs", tmp_path / "mine.yaml")
    for hypothesis in hypotheses:
        expected, _, _ = hypothesis["id"].partition("-")
        assert judged[hypothesis["id"]].verdict == expected, hypothesis["rule"]


def test_points_exactly_on_a_line_decide_no_trend(tmp_path):
    for size, gap in ((1, 0.1), (2, 0.2), (4, 0.3)):
        data = {"data": {"splits": {"train": {"tokens": size * 10**6, "sha256": str(size) * 8}}}}
        language_run(tmp_path / f"{size}", "baseline", 0, 3.0, description=f"{size}", environment=data)
        language_run(tmp_path / f"{size}", "oelm-freeze", 0, 3.0 + gap, description=f"{size}", environment=data)
    verdict = verdicts(tmp_path)["TREND"]
    assert (verdict.verdict, verdict.p, verdict.notes[0].code) == ("undecided", None, "no_scatter")
    assert verdict.estimate.mean == pytest.approx(0.1)


def test_a_trend_takes_the_setup_with_the_most_seeds_of_a_data_set(tmp_path):
    for size in (1, 8, 64):
        data = {"data": {"splits": {"train": {"tokens": size * 10**6, "sha256": str(size) * 8}}}}
        for seed in range(2):
            language_run(tmp_path / f"{size}", "baseline", seed, 3.0, description=f"{size}", environment=data)
            language_run(tmp_path / f"{size}", "oelm-freeze", seed, 3.1, description=f"{size}", environment=data)
    tenth = {"environment": data, "description": "64", "changes": {"data": {"fraction": 0.1}}}
    language_run(tmp_path / "tenth", "baseline", 0, 5.0, **tenth)
    language_run(tmp_path / "tenth", "oelm-freeze", 0, 5.0, **tenth)
    verdict = verdicts(tmp_path)["TREND"]
    assert verdict.estimate.mean == pytest.approx(0, abs=1e-9)
    assert len(verdict.runs) == 12


def test_hypotheses_in_a_file_are_added_to_the_built_in_ones(tmp_path):
    arms(tmp_path / "runs", identity_key=-0.05)
    mine = tmp_path / "mine.yaml"
    claim = {"id": "MINE", "title": "identity-key costs nothing", "arm": "identity-key", "against": "baseline"}
    mine.write_text(yaml.safe_dump([{**claim, "measure": "perplexity", "compare": "change", "rule": {"at_most": 0}}]))
    judged = verdicts(tmp_path / "runs", mine)
    assert judged["MINE"].verdict == "supported"
    assert "H1" in judged


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"measure": "perplexty"}, "'perplexty'.*'perplexity'"),
        ({"rule": {}}, "exactly one of"),
        ({"rule": {"above": 1, "below": 2}}, "exactly one of"),
        ({"rule": {"within": -0.1}}, r"within -0\.1"),
        ({"compare": "points"}, "not for perplexity"),
        ({"against": None}, "against"),
        ({"id": "H1"}, "built-in"),
        ({"verdict": "yes"}, "unknown key"),
        ({"rule": {"at_least": -1.5}}, "above -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_malformed_hypothesis_is_refused_with_the_reason(tmp_path, entry, message):
    base = {"id": "X", "title": "x", "arm": "oelm-freeze", "against": "baseline", "measure": "perplexity"}
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump([{**base, "rule": {"below": 0}, **entry}]))
    with pytest.raises(AnalysisError, match=message):
        load_hypotheses(file)


@pytest.mark.parametrize("text", ["a: [", "just: a mapping", "- 3"])
def test_files_without_a_list_of_hypotheses_are_refused(tmp_path, text):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(AnalysisError, match=r"mine\.yaml"):
        load_hypotheses(file)
    with pytest.raises(AnalysisError, match="cannot be read"):
        load_hypotheses(tmp_path / "absent.yaml")


def test_a_true_hypothesis_is_seldom_refuted_and_one_at_its_bound_seldom_decided():
    """Of 3,000 simulated samples of four seeds at the bound, at most 2.5 % are decided in each direction."""
    samples = np.random.default_rng(5).normal(0.1, 0.02, (3000, 4))
    decided = [direction for sample in samples for direction, p in [decide(sample, -math.inf, 0.1)] if p < 0.05]
    for direction in ("supported", "refuted"):
        assert decided.count(direction) / 3000 == pytest.approx(0.025, abs=0.01)
