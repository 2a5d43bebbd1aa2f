"""The verdicts on a plan's hypotheses, computed again with numpy and scipy from the files of the records alone."""

import json

import numpy as np
import pytest
from scipy import stats

from oelm.analysis import analyse
from oelm.report.charts import Styles
from oelm.report.compose import compose
from oelm.report.drawing import draw
from oelm.report.markdown import block_text
from oelm.report.plan import plan_section
from oelm.report.shown import forest_figure
from oelm.report.tables import results_json
from oelm.report.words import words
from tests.support.plans import DOCUMENTS, fail, group, hypothesis, planned_run, recorded_logs, study_of
from tests.support.records import change, write, write_status

NOISE = np.random.default_rng(3).normal(0, 0.002, (5, 6))
# The mean cost of each method in the logarithm of the perplexity.
COSTS = {"baseline": 0.0, "identity-key": 0.004, "oelm-freeze": 0.06, "oelm-nofreeze": -0.004, "oelm-random": 0.019}
FAMILY = [
    hypothesis("identity", "identity-key"),
    hypothesis("frozen", "oelm-freeze", margin=0.03),
    hypothesis("ahead", "oelm-nofreeze", margin=0.0, test="welch"),
    hypothesis("random", "oelm-random"),
]


def written(root, study, methods=tuple(COSTS), seeds=range(6), **options):
    """Write the runs of some methods; seeds are alike in all of them, so that pairs differ by little."""
    for row, (method, cost) in enumerate(COSTS.items()):
        for seed in seeds if method in methods else ():
            planned_run(root, study, method, seed, 3.2 + 0.03 * seed + cost + NOISE[row][seed], **options)


def found(root, study, **options):
    """Return what results.json says of the plan, with the hypotheses by id."""
    plan = json.loads(results_json(analyse([root], study=study, **options)))["plan"]
    return plan, {item["id"]: item for item in plan["hypotheses"]}


def section(root, study, **options):
    """Return the section of the plan as Markdown."""
    blocks = plan_section(analyse([root], study=study, **options), Styles([]), words("en"))
    return "\n\n".join(map(block_text, blocks))


def expected_test(root, claim):
    """Return the change, its interval and the one-sided p of a hypothesis, by scipy."""
    one, other = (recorded_logs(root, claim[side].removeprefix("conf/")) for side in ("arm", "against"))
    bound = np.log(1 + claim["margin"])
    if claim["test"] == "paired":
        logs = np.array([one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())])
        interval = stats.ttest_1samp(logs, 0).confidence_interval(0.95)
        p, mean = stats.ttest_1samp(logs, bound, alternative="less").pvalue, logs.mean()
    else:
        a, b = np.array(list(one.values())), np.array(list(other.values()))
        interval = stats.ttest_ind(a, b, equal_var=False).confidence_interval(0.95)
        p, mean = stats.ttest_ind(a - bound, b, equal_var=False, alternative="less").pvalue, a.mean() - b.mean()
    return *(np.exp([mean, interval.low, interval.high]) - 1), p


def holm(values):
    """Return Holm's p-values, by the definition: the largest of the scaled ones up to each rank."""
    order = np.argsort(values)
    scaled = np.minimum(1, (len(values) - np.arange(len(values))) * np.array(values)[order])
    adjusted = np.empty(len(values))
    adjusted[order] = np.maximum.accumulate(scaled)
    return adjusted


def test_estimate_interval_p_and_verdict_are_those_of_scipy(tmp_path):
    study = study_of(tmp_path, FAMILY)
    written(tmp_path / "runs", study)
    plan, results = found(tmp_path / "runs", study)
    expected = [expected_test(tmp_path / "runs", claim) for claim in FAMILY]
    adjusted = holm([p for *_, p in expected])
    for claim, (mean, low, high, p), corrected in zip(FAMILY, expected, adjusted, strict=True):
        result = results[claim["id"]]
        change_found = [result["change"][name] for name in ("mean", "low", "high")]
        assert change_found == pytest.approx([mean, low, high], rel=1e-9)
        assert (result["p"], result["p_holm"]) == pytest.approx((p, corrected), rel=1e-9)
        verdict = "holds" if corrected < 0.025 else "does-not-hold" if low > claim["margin"] else "not-shown"
        assert result["verdict"] == verdict
        assert (high < claim["margin"]) or verdict != "holds"
    assert [item["verdict"] for item in results.values()] == ["holds", "does-not-hold", "not-shown", "not-shown"]
    assert results["identity"]["counts"] == [{"judged": 6, "planned": 6}]
    assert results["ahead"]["counts"] == [{"judged": 6, "planned": 6}] * 2
    assert (len(plan["finished"]), plan["missing"], plan["lost"], plan["apart"]) == (30, [], {}, [])


def test_the_interval_over_texts_is_a_bootstrap_of_whole_documents(tmp_path):
    study = study_of(tmp_path, FAMILY)
    written(tmp_path / "runs", study)
    _, results = found(tmp_path / "runs", study)
    sums = {}
    for method in ("identity-key", "baseline"):
        files = (tmp_path / "runs").glob(f"conf/{method}/*/result.json")
        losses = [json.loads(file.read_text())["evaluations"]["test"]["document_losses"] for file in files]
        sums[method] = np.mean(losses, axis=0)
    difference, tokens = sums["identity-key"] - sums["baseline"], np.array(DOCUMENTS)
    drawn = np.random.default_rng(8).integers(len(tokens), size=(20_000, len(tokens)))
    low, high = np.exp(np.quantile(difference[drawn].sum(1) / tokens[drawn].sum(1), [0.025, 0.975])) - 1
    assert results["identity"]["over_texts"] == pytest.approx([low, high], abs=0.05 * (high - low))


def test_there_is_no_verdict_before_all_planned_runs_have_ended(tmp_path):
    """A hypothesis that cannot be tested yet counts in the family with a p of 1."""
    study = study_of(tmp_path, FAMILY)
    written(tmp_path / "runs", study)
    whole, _ = found(tmp_path / "runs", study)
    (tmp_path / "runs/conf/oelm-freeze/seed-3").rename(tmp_path / "away")
    plan, results = found(tmp_path / "runs", study)
    assert plan["missing"] == ["conf/oelm-freeze/seed-3"]
    assert plan["command"] == f"oelm matrix {study.path} --out {tmp_path / 'runs'}"
    frozen = results["frozen"]
    assert (frozen["verdict"], frozen["p_holm"], frozen["counts"]) == ("not-run", None, [{"judged": 5, "planned": 6}])
    assert frozen["missing"] == {"conf/oelm-freeze": [3]}
    assert frozen["change"]["mean"] == pytest.approx(expected_test(tmp_path / "runs", FAMILY[1])[0])
    p = [1.0 if claim["id"] == "frozen" else expected_test(tmp_path / "runs", claim)[3] for claim in FAMILY]
    for claim, corrected in zip(FAMILY, holm(p), strict=True):
        if claim["id"] != "frozen":
            assert results[claim["id"]]["p_holm"] == pytest.approx(corrected, rel=1e-9)
    assert whole["command"] is None


def test_a_run_that_has_not_ended_is_missing(tmp_path):
    """One was interrupted, one is damaged, one was never begun."""
    study = study_of(tmp_path, FAMILY)
    written(tmp_path / "runs", study)
    folders = [tmp_path / f"runs/conf/identity-key/seed-{seed}" for seed in range(3)]
    (folders[0] / "result.json").unlink()
    write_status(folders[0], "stopped", step=100)
    (folders[1] / "audit.json").write_text("{")
    folders[2].rename(tmp_path / "away")
    plan, results = found(tmp_path / "runs", study)
    assert plan["missing"] == [f"conf/identity-key/seed-{seed}" for seed in range(3)]
    assert (results["identity"]["verdict"], results["identity"]["counts"][0]["judged"]) == ("not-run", 3)
    text = section(tmp_path / "runs", study)
    assert "3 runs missing (0 of them in progress)" in text
    assert f"`{plan['command']}`" in text


def test_the_data_of_the_runs_is_in_the_command_that_runs_what_is_missing(tmp_path):
    study = study_of(tmp_path, FAMILY)
    written(tmp_path / "runs", study, seeds=range(5), data={"path": "my texts"})
    plan, _ = found(tmp_path / "runs", study)
    assert plan["command"] == f"oelm matrix {study.path} --out {tmp_path / 'runs'} --data 'my texts'"
    assert len(plan["missing"]) == 5


@pytest.mark.parametrize(("lost", "verdicts"), [("identity-key", "not-shown"), ("baseline", "holds")])
@pytest.mark.parametrize("how", ["failed", "diverged"])
def test_a_lost_run_speaks_against_its_arm(tmp_path, lost, verdicts, how):
    """The runs that are left make their arm look better, so no verdict is given in its favour; pairs are lost, too."""
    study = study_of(tmp_path, FAMILY)
    written(tmp_path / "runs", study)
    folder = planned_run(tmp_path / "runs", study, lost, 2, None)
    if how == "failed":
        fail(folder)
    plan, results = found(tmp_path / "runs", study)
    assert (plan["lost"], plan["missing"]) == ({f"conf/{lost}/seed-2": how}, [])
    identity = results["identity"]
    assert (identity["verdict"], identity["counts"]) == (verdicts, [{"judged": 5, "planned": 6}])
    assert (identity["p_holm"] is None) is (lost == "identity-key")
    assert identity["p"] == pytest.approx(expected_test(tmp_path / "runs", FAMILY[0])[3], rel=1e-9)
    assert {note["code"] for note in identity["notes"]} == {"plan_lost"}
    # The baseline without that seed may look better than it is, so that nothing can be shown to lose against it.
    assert results["frozen"]["verdict"] == ("not-shown" if lost == "baseline" else "does-not-hold")


@pytest.mark.parametrize(("sha256", "why"), [(None, "before"), ("0" * 64, "version")])
def test_runs_of_no_plan_or_of_another_version_are_counted_apart(tmp_path, sha256, why):
    study = study_of(tmp_path, FAMILY)
    written(tmp_path / "runs", study, methods=[name for name in COSTS if name != "identity-key"])
    written(tmp_path / "runs", study, methods=["identity-key"], sha256=sha256)
    plan, results = found(tmp_path / "runs", study)
    assert {(run["run"].split("/")[1], run["why"]) for run in plan["apart"]} == {("identity-key", why)}
    assert len(plan["apart"]) == 6
    # In the folder of these runs the command would find them done.
    assert plan["command"] == f"oelm matrix {study.path} --out {tmp_path / 'runs'}-{study.sha256[:8]}"
    assert (results["identity"]["verdict"], results["identity"]["change"]) == ("not-run", None)
    assert "run before the plan or under another version" in section(tmp_path / "runs", study)
    plan, results = found(tmp_path / "runs", study, any_version=True)
    assert (plan["any_version"], results["identity"]["verdict"]) == (True, "holds")


def test_a_run_whose_settings_the_plan_does_not_give_is_counted_apart(tmp_path):
    study = study_of(tmp_path, FAMILY)
    written(tmp_path / "runs", study, seeds=range(5))
    written(tmp_path / "runs", study, methods=[name for name in COSTS if name != "identity-key"], seeds=[5])
    planned_run(tmp_path / "runs", study, "identity-key", 5, 3.3, optimizer={"learning_rate": 2e-3})
    plan, results = found(tmp_path / "runs", study)
    assert [(run["run"], run["why"]) for run in plan["apart"]] == [("conf/identity-key/seed-5", "settings")]
    assert results["identity"]["verdict"] == "not-run"


def test_a_planned_run_is_found_beside_an_equal_one_that_came_first(tmp_path):
    """A report counts equal runs once; the plan's is used although the earlier one is that which is counted."""
    study = study_of(tmp_path, FAMILY)
    written(tmp_path / "a-earlier", study, methods=["baseline", "identity-key"], sha256=None, experiment="explored")
    written(tmp_path / "b-planned", study)
    analysis = analyse([tmp_path / "a-earlier", tmp_path / "b-planned"], study=study)
    assert analysis.confirmed.planned.missing == ()
    assert analysis.confirmed.tested[0].verdict == "holds"
    assert all("b-planned" in str(run.path) for run in analysis.confirmed.planned.finished.values())
    assert analysis.confirmed.planned.others == 12


def test_runs_without_the_loss_that_judges_get_no_verdict(tmp_path):
    study = study_of(tmp_path, FAMILY)
    written(tmp_path / "runs", study)
    change(tmp_path / "runs/conf/identity-key/seed-0", "result.json", evaluations={})
    _, results = found(tmp_path / "runs", study)
    assert results["identity"]["verdict"] == "not-run"
    assert {note["code"] for note in results["identity"]["notes"]} == {"plan_unjudged"}


def test_runs_that_were_judged_on_other_texts_get_no_verdict(tmp_path):
    study = study_of(tmp_path, FAMILY)
    written(tmp_path / "runs", study)
    file = tmp_path / "runs/conf/identity-key/seed-0/environment.json"
    recorded = json.loads(file.read_text())
    recorded["data"]["splits"]["test"] = {"sha256": "ef" * 32}
    write(file.parent, file.name, recorded)
    _, results = found(tmp_path / "runs", study)
    codes = {note["code"] for note in results["identity"]["notes"]}
    assert (results["identity"]["verdict"], codes) == ("not-shown", {"plan_texts", "plan_differs"})
    assert results["random"]["p"] is not None


def test_pairs_that_all_differ_by_the_same_amount_get_no_verdict(tmp_path):
    study = study_of(tmp_path, FAMILY[:1])
    for seed in range(6):
        for method in ("baseline", "identity-key"):
            planned_run(tmp_path / "runs", study, method, seed, 3.2 + 0.25 * seed)
    _, results = found(tmp_path / "runs", study)
    assert (results["identity"]["verdict"], results["identity"]["p"]) == ("not-shown", None)
    assert {note["code"] for note in results["identity"]["notes"]} == {"plan_no_spread"}


def test_the_validation_text_judges_where_the_plan_says_so(tmp_path):
    study = study_of(tmp_path, FAMILY[:1], judges="val")
    written(tmp_path / "runs", study, methods=["baseline", "identity-key"])
    _, results = found(tmp_path / "runs", study)
    # The validation loss is lower by the same amount in every run, so the change is that of the test text.
    assert results["identity"]["change"]["mean"] == pytest.approx(expected_test(tmp_path / "runs", FAMILY[0])[0])
    assert results["identity"]["over_texts"] is None
    assert "the one that settings were chosen on" in section(tmp_path / "runs", study)


@pytest.mark.parametrize(("language", "mark"), [("en", "descriptive"), ("zh", "描述性")])
def test_a_report_begins_with_the_plan_and_marks_the_rest_as_descriptive(tmp_path, language, mark):
    study = study_of(tmp_path, FAMILY)
    written(tmp_path / "runs", study)
    planned_run(tmp_path / "runs", study, "baseline", 0, 3.4, experiment="explored", optimizer={"weight_decay": 0.5})
    analysis = analyse([tmp_path / "runs"], study=study)
    document = compose(analysis, tmp_path, language)
    headings = [heading for heading in document.headings if heading.level == 2]
    described = [heading.anchor for heading in headings if mark in heading.text]
    assert headings[0].anchor == "plan"
    assert described == ["summary", "results-1", "results-2", "hypotheses", "step-time"]
    assert [table.name for table in document.tables[:2]] == ["plan", "plan-tests"]
    assert len(document.tables[1].rows[0][-1].runs) == 12
    assert analysis.confirmed.planned.others == 1


SHOWN = [group(oelm_random="random", identity_key="identity key")]


def test_shown_arms_have_the_estimates_of_their_pairs_and_no_verdict(tmp_path):
    study = study_of(tmp_path, FAMILY, shown=SHOWN)
    written(tmp_path / "runs", study)
    plan, _ = found(tmp_path / "runs", study)
    (shown,) = plan["shown"]
    assert (shown["reference"], [arm["name"] for arm in shown["arms"]]) == ("conf/baseline", ["random", "identity key"])
    for arm in shown["arms"]:
        one, other = (recorded_logs(tmp_path / "runs", name) for name in (arm["arm"].removeprefix("conf/"), "baseline"))
        logs = np.array([one[seed] - other[seed] for seed in sorted(one)])
        wide, narrow = (stats.ttest_1samp(logs, 0).confidence_interval(level) for level in (0.95, 0.90))
        bounds = [arm["change"][name] for name in ("mean", "low", "high")]
        assert bounds == pytest.approx(np.exp([logs.mean(), wide.low, wide.high]) - 1, rel=1e-9)
        assert arm["narrow"] == pytest.approx(np.exp([narrow.low, narrow.high]) - 1, rel=1e-9)
        assert arm["over_texts"][0] < arm["change"]["mean"] < arm["over_texts"][1]
        assert arm["pairs"] == 6


def test_the_forest_has_the_references_own_seeds_and_the_margins_of_its_hypotheses(tmp_path):
    direct = hypothesis("direct", "identity-key", margin=0.0, against="conf/oelm-random")
    study = study_of(tmp_path, [*FAMILY[:1], direct], shown=SHOWN)
    written(tmp_path / "runs", study)
    analysis = analyse([tmp_path / "runs"], study=study)
    styles = Styles([])
    confirmed = analysis.confirmed
    figure = forest_figure(confirmed.shown, "plan-forest", styles, words("en"), confirmed.tested)
    arms, against = figure.charts
    assert [row.label for row in arms.rows] == ["the reference", "identity key", "random"]
    reference, identity, random = arms.rows
    by_seed = recorded_logs(tmp_path / "runs", "baseline")
    own = np.array([by_seed[seed] for seed in sorted(by_seed)])
    assert reference.dots == pytest.approx((100 * (np.exp(own - own.mean()) - 1)).tolist())
    assert (reference.low, reference.reach, random.reach) == (None, None, None)
    assert identity.reach == (0.0, 2.0)
    assert len(identity.dots) == 6
    assert identity.low < identity.value < identity.high < identity.reach[1]
    assert [row.label for row in against.rows] == ["identity key, against random"]
    assert against.rows[0].reach is None
    drawn = draw([figure])["plan-forest"].svg
    assert "identity key, against random" in drawn
    assert "A tiny GPT" in section(tmp_path / "runs", study)


def test_arms_that_are_not_run_yet_are_shown_without_a_figure(tmp_path):
    study = study_of(tmp_path, FAMILY, shown=SHOWN)
    written(tmp_path / "runs", study, methods=["baseline", "identity-key"], seeds=range(1))
    plan, _ = found(tmp_path / "runs", study)
    by_name = {arm["name"]: arm for arm in plan["shown"][0]["arms"]}
    assert (by_name["random"]["change"], by_name["random"]["pairs"]) == (None, 0)
    assert (by_name["identity key"]["narrow"], by_name["identity key"]["pairs"]) == (None, 1)
    text = section(tmp_path / "runs", study)
    assert "| random | – | – |" in text
    assert "![Arms beside their references]" in text
