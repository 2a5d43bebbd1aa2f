"""Comparisons of arms: pairs, learning rates, confounds, FLOPs and simulated runs."""

import math
from dataclasses import replace

import numpy as np
import pytest

from oelm.analysis import analyse, load_run, load_runs
from oelm.analysis.arms import MEASURES, Arm, Setup, group_runs
from oelm.analysis.compare import compare_runs, headline, of_pairs
from oelm.analysis.run import flop_ratio
from oelm.report.compose import arms_table
from oelm.report.words import words
from oelm.runs.schema import TaskRecord
from tests.support.records import change, classification_run, language_run, study, write_status


def comparison_of(analysis, arm="oelm-freeze"):
    """Return the comparison of an arm with its reference, of which there must be one."""
    (comparison,) = [comparison for comparison in analysis.comparisons if comparison.arm == arm]
    return comparison


def note_codes(comparison):
    return {note.code for note in comparison.notes}


def test_arms_are_paired_by_seed_at_their_best_rates(tmp_path):
    analysis = analyse([study(tmp_path)])
    comparison = comparison_of(analysis)
    assert (comparison.basis, comparison.rate, comparison.reference_rate, comparison.grid) == (
        "best",
        1e-3,
        1e-3,
        (5e-4, 1e-3, 2e-3),
    )
    assert [(a.seed, b.seed) for a, b in comparison.pairs] == [(0, 0), (1, 1), (2, 2)]
    differences = [0.1, 0.1 - 0.004, 0.1 + 0.003]
    assert comparison.ratio.mean == pytest.approx(math.exp(np.mean(differences)))
    half = 4.302652729911275 * np.std(differences, ddof=1) / math.sqrt(3)
    assert comparison.ratio.low == pytest.approx(math.exp(np.mean(differences) - half))
    assert comparison.winner == "baseline"
    assert [(comparison.rate, comparison.n) for comparison in analysis.equal] == [(5e-4, 3), (1e-3, 3), (2e-3, 3)]
    assert not note_codes(comparison) & {"edge_low", "edge_high"}


def test_with_one_seed_there_is_a_ratio_and_no_verdict(tmp_path):
    analysis = analyse([study(tmp_path, seeds=1)])
    comparison = comparison_of(analysis)
    assert comparison.ratio.mean == pytest.approx(math.exp(0.1))
    assert (comparison.ratio.low, comparison.adjusted, comparison.alike, comparison.winner) == (None, None, None, None)
    assert "one_seed" in note_codes(comparison)
    assert {verdict.verdict for verdict in analysis.verdicts if verdict.hypothesis.against} == {"undecided"}


def test_each_arm_gets_its_own_best_rate_from_the_grid_that_both_have(tmp_path):
    for seed in (0, 1):
        for rate, loss in ((1e-3, 3.0), (2e-3, 3.1), (4e-3, 3.2)):
            language_run(tmp_path, "baseline", seed, loss + seed / 100, rate)
        for rate, loss in ((2e-3, 3.3), (4e-3, 3.2), (8e-3, 2.0)):
            language_run(tmp_path, "oelm-freeze", seed, loss + seed / 90, rate)
    comparison = comparison_of(analyse([tmp_path]))
    assert (comparison.grid, comparison.rate, comparison.reference_rate) == ((2e-3, 4e-3), 4e-3, 2e-3)
    assert comparison.sound  # each arm has its own rate by design, so this is no confound
    elsewhere = [dict(note.values) for note in comparison.notes if note.code == "better_elsewhere"]
    assert elsewhere == [{"arm": "oelm-freeze", "rate": "0.008"}, {"arm": "baseline", "rate": "0.001"}]


def test_a_better_rate_that_both_arms_have_gives_no_note(tmp_path):
    """The rate is chosen over the common seeds; over all its seeds the arm is better at another rate of that grid."""
    for seed, loss_at_1e3, loss_at_2e3 in ((0, 3.1, 3.0), (1, 3.1, 3.5)):
        language_run(tmp_path, "oelm-freeze", seed, loss_at_1e3, 1e-3)
        language_run(tmp_path, "oelm-freeze", seed, loss_at_2e3, 2e-3)
        language_run(tmp_path, "baseline", seed, 3.0, 1e-3)
    language_run(tmp_path, "baseline", 0, 2.9, 2e-3)
    comparison = comparison_of(analyse([tmp_path]))
    assert comparison.rate == 2e-3
    assert "better_elsewhere" not in [note.code for note in comparison.notes]


def test_a_best_rate_at_the_edge_of_the_grid_gives_a_note(tmp_path):
    for method, losses in (("baseline", (3.0, 3.1)), ("oelm-freeze", (3.3, 3.2))):
        for rate, loss in zip((1e-3, 2e-3), losses, strict=True):
            language_run(tmp_path, method, 0, loss, rate)
    edges = [
        (note.code, dict(note.values)["arm"])
        for note in comparison_of(analyse([tmp_path])).notes
        if "edge" in note.code
    ]
    assert edges == [("edge_high", "oelm-freeze"), ("edge_low", "baseline")]


def test_the_rate_is_chosen_over_the_same_seeds_at_every_rate(tmp_path):
    """At 2e-3 only seed 0 was run, which is better than average: it must not win against a mean of three seeds."""
    for method in ("baseline", "oelm-freeze"):
        for seed, loss in enumerate((3.0, 3.4, 3.4)):
            language_run(tmp_path, method, seed, loss, 1e-3)
        language_run(tmp_path, method, 0, 3.05, 2e-3)
    comparison = comparison_of(analyse([tmp_path]))
    assert (comparison.rate, comparison.n) == (1e-3, 3)
    assert dict(next(note.values for note in comparison.notes if note.code == "grid"))["seeds"] == "1"


def test_arms_without_a_common_rate_are_confounded_and_get_no_verdict(tmp_path):
    for seed in (0, 1, 2):
        language_run(tmp_path, "baseline", seed, 3.0 + seed / 100, 3e-4)
        language_run(tmp_path, "oelm-freeze", seed, 3.2 + seed / 90, 1e-3)
    analysis = analyse([tmp_path])
    comparison = comparison_of(analysis)
    assert comparison.basis == "confounded"
    assert [item.field for item in comparison.confounds] == ["optimizer.learning_rate"]
    assert (comparison.adjusted, comparison.winner) == (None, None)
    (h4,) = [verdict for verdict in analysis.verdicts if verdict.hypothesis.id == "H4"]
    assert (h4.verdict, h4.notes[0].code) == ("undecided", "confounded")


def test_arms_without_a_common_rate_are_compared_even_if_no_seed_has_every_rate(tmp_path):
    language_run(tmp_path, "baseline", 0, 3.0, 1e-3)
    language_run(tmp_path, "oelm-freeze", 0, 3.1, 2e-3)
    language_run(tmp_path, "oelm-freeze", 1, 3.1, 4e-3)
    comparison = comparison_of(analyse([tmp_path]))
    assert (comparison.basis, comparison.n, comparison.sound) == ("confounded", 1, False)


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"changes": {"train": {"batch_size": 32}}}, "train.batch_size"),
        ({"steps": 800}, "train.max_steps"),
        (
            {"environment": {"data": {"splits": {"train": {"sha256": "00" * 32}}}}},
            "environment.data.splits.train.sha256",
        ),
        ({"environment": {"gpu": {"name": "Another GPU"}}}, "environment.gpu.name"),
        ({"environment": {"versions": {"torch": "2.0.0"}}}, "environment.versions.torch"),
        ({"changes": {"data": {"seed": 77}}}, "data.order"),
        ({"changes": {"model": {"name": "gpt:small"}}}, "model.name"),
        ({"changes": {"optimizer": {"layer_decay": 0.9}}}, "optimizer.layer_decay"),
        ({"changes": {"optimizer": {"name": "muon"}}}, "optimizer.name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_arms_that_differ_in_more_than_the_method_are_flagged_with_the_field(tmp_path, options, field):
    for seed in (0, 1, 2):
        language_run(tmp_path, "baseline", seed, 3.0 + seed / 100)
        language_run(tmp_path, "oelm-freeze", seed, 3.2 + seed / 90, **options)
    comparison = comparison_of(analyse([tmp_path]))
    assert field in {item.field for item in comparison.confounds}
    assert comparison.ratio is not None  # the ratio is shown
    assert (comparison.adjusted, comparison.winner) == (None, None)  # but nothing is concluded from it


def test_a_setup_that_differs_in_many_fields_is_not_used_as_reference(tmp_path):
    other_settings = {"model": {"name": "gpt:small"}, "optimizer": {"weight_decay": 0.3}, "train": {"batch_size": 32}}
    language_run(tmp_path, "baseline", 0, 3.0)
    language_run(tmp_path, "oelm-freeze", 0, 3.2, changes=other_settings, steps=800)
    assert not analyse([tmp_path]).comparisons


def test_commits_and_paths_do_not_confound(tmp_path):
    for seed in (0, 1, 2):
        language_run(tmp_path, "baseline", seed, 3.0 + seed / 100)
        harmless_changes = {"data": {"path": "/elsewhere/text"}, "log": {"every": 3}, "eval": {"targets": [1.5]}}
        language_run(
            tmp_path, "oelm-freeze", seed, 3.2 + seed / 90, changes=harmless_changes, environment={"git_commit": "def"}
        )
    comparison = comparison_of(analyse([tmp_path]))
    assert comparison.sound
    assert [item.field for item in comparison.cautions] == ["environment.git_commit"]


def test_seeds_of_only_one_arm_are_not_compared(tmp_path):
    for seed in (0, 1, 2, 3):
        language_run(tmp_path, "baseline", seed, 3.0 + seed / 100)
    for seed in (2, 3, 4):
        language_run(tmp_path, "oelm-freeze", seed, 3.2 + seed / 90)
    comparison = comparison_of(analyse([tmp_path]))
    assert [a.seed for a, _ in comparison.pairs] == [2, 3]
    assert len(comparison.unpaired) == 3
    assert "unpaired" in note_codes(comparison)


@pytest.mark.parametrize("failing_arm", ["baseline", "oelm-freeze"])
def test_an_arm_with_failed_seeds_shows_their_number_and_gets_no_verdict(tmp_path, failing_arm):
    """The remaining seeds are not a random sample: their mean makes the arm look better than it is."""
    for seed in range(5):
        for method, accuracy in (("baseline", 0.8), ("oelm-freeze", 0.7)):
            failed = method == failing_arm and seed > 2
            value = 0.5 if failed else accuracy + 0.001 * seed
            classification_run(tmp_path, method=method, seed=seed, accuracy=value, at_chance=failed)
    analysis = analyse([tmp_path])
    comparison = comparison_of(analysis)
    assert (comparison.n, comparison.sound, comparison.winner) == (3, False, None)
    failed_seeds = {"0 of 5", "2 of 5"}
    assert [{item.one, item.other} for item in comparison.confounds if item.field == "seeds that failed"] == [
        failed_seeds
    ]
    assert of_pairs(comparison, MEASURES["step_seconds"]).sound, "step times of a failed run are as valid as any"
    table = arms_table(analysis, comparison.setup, 1, words("en"))
    seeds_shown = {row[0].text: row[2].text for row in table.rows}
    assert seeds_shown == {"baseline": "5", "oelm-freeze": "5", failing_arm: "3 of 5"}
    assert "makes the arm look better" in table.caption


@pytest.mark.parametrize("loss", [650.0, 800.0])
def test_a_seed_whose_perplexity_overflows_counts_as_failed(tmp_path, loss):
    for seed in range(3):
        language_run(tmp_path, "baseline", seed, 3.0 + 0.01 * seed)
        folder = language_run(tmp_path, "oelm-freeze", seed, 3.1 + 0.02 * seed)
    perplexity = math.exp(loss) if loss < 700 else None  # as the engine records it
    change(folder, "result.json", val_loss=loss, perplexity=perplexity, best_perplexity=perplexity)
    analysis = analyse([tmp_path])
    (comparison,) = analysis.comparisons
    assert [item.kind for item in analysis.left_out] == ["diverged"]
    assert (comparison.n, comparison.sound, comparison.confounds[0].field) == (2, False, "seeds that failed")


def test_an_interval_that_overflows_is_infinite(tmp_path):
    for seed, (baseline_loss, freeze_loss) in enumerate([(3.0, 3.0), (3.01, 190.0)]):
        language_run(tmp_path, "baseline", seed, baseline_loss)
        language_run(tmp_path, "oelm-freeze", seed, freeze_loss)
    (comparison,) = analyse([tmp_path]).comparisons
    assert comparison.n == 2
    assert comparison.ratio.high == math.inf
    assert not comparison.conclusive


def test_only_pairs_that_have_the_measure_are_counted(tmp_path):
    for seed in range(3):
        classification_run(tmp_path, "baseline", seed, 0.9 + 0.01 * seed)
        folder = classification_run(tmp_path, "oelm-freeze", seed, 0.8 + 0.02 * seed)
    change(folder, "result.json", accuracy=None, last={"step": 300, "loss": 0.1})
    (comparison,) = analyse([tmp_path]).comparisons
    assert (comparison.n, comparison.difference.n) == (2, 2)


def test_an_aborted_run_is_a_failed_seed_until_it_is_repeated(tmp_path):
    study(tmp_path, seeds=3)
    broken = language_run(tmp_path / "first", "oelm-freeze", 3)
    (broken / "result.json").unlink()
    write_status(broken, "failed", message="step 7: the loss is not a number")
    assert "seeds that failed" in {item.field for item in comparison_of(analyse([tmp_path])).confounds}
    for method in ("baseline", "oelm-freeze"):
        language_run(tmp_path, method, 3)
    assert comparison_of(analyse([tmp_path])).sound


@pytest.mark.parametrize("folder_of_repetition", ["0-before", "z-after"])
def test_a_diverged_run_is_a_failed_seed_until_it_is_repeated(tmp_path, folder_of_repetition):
    """Whether the folder of the repetition is read before or after that of the diverged run."""
    study(tmp_path / "study", seeds=3)
    for method, loss in (("baseline", 3.2), ("oelm-freeze", None)):
        for rate in (5e-4, 1e-3, 2e-3):
            language_run(tmp_path / "study", method, 3, loss, rate)
    assert "seeds that failed" in {item.field for item in comparison_of(analyse([tmp_path])).confounds}
    for rate in (5e-4, 1e-3, 2e-3):
        language_run(tmp_path / folder_of_repetition, "oelm-freeze", 3, 3.3, rate)
    analysis = analyse([tmp_path])
    assert (comparison_of(analysis).sound, comparison_of(analysis).n) == (True, 4)
    assert [item.kind for item in analysis.left_out] == ["diverged"] * 3


def test_a_seed_that_failed_twice_counts_once(tmp_path):
    for seed in range(3):
        language_run(tmp_path, "baseline", seed, 3.0)
        language_run(tmp_path, "oelm-freeze", seed, 3.1 + seed / 100 if seed < 2 else None)
    broken = language_run(tmp_path / "again", "oelm-freeze", 2)
    (broken / "result.json").unlink()
    write_status(broken, "failed", message="step 7: the loss is not a number")
    (confound,) = comparison_of(analyse([tmp_path])).confounds
    assert (confound.one, confound.other) == ("1 of 3", "0 of 3")


def test_a_rate_at_which_every_seed_failed_does_not_affect_other_rates(tmp_path):
    for seed in range(3):
        for method in ("baseline", "oelm-freeze"):
            classification_run(tmp_path, method=method, seed=seed, accuracy=0.8 + 0.01 * seed)
        classification_run(tmp_path, method="oelm-freeze", seed=seed, accuracy=0.5, rate=1e-1, at_chance=True)
    assert comparison_of(analyse([tmp_path])).sound


def test_arms_without_a_common_seed_are_not_paired(tmp_path):
    language_run(tmp_path, "baseline", 0)
    language_run(tmp_path, "oelm-freeze", 1)
    comparison = comparison_of(analyse([tmp_path]))
    assert (comparison.n, comparison.ratio, comparison.winner) == (0, None, None)
    assert "no_common_seed" in note_codes(comparison)


def test_runs_of_different_tasks_are_never_paired(tmp_path):
    language_run(tmp_path, "baseline")
    classification_run(tmp_path, "oelm-freeze")
    classification_run(tmp_path, "baseline", task="mnli")
    analysis = analyse([tmp_path])
    assert [(group.task.kind, group.task.name) for group in analysis.groups] == [
        ("classification", "mnli"),
        ("classification", "sst2"),
        ("language", "language"),
    ]
    assert not analysis.comparisons


def test_accuracies_are_compared_in_points(tmp_path):
    for seed, noise in enumerate((0.0, 0.002, -0.001)):
        classification_run(tmp_path, "baseline", seed, 0.93 + noise)
        classification_run(tmp_path, "oelm-freeze", seed, 0.91 + 2 * noise)
    comparison = comparison_of(analyse([tmp_path]))
    assert comparison.measure.name == "accuracy"
    assert comparison.difference.mean == pytest.approx(-0.02 + 0.001 / 3)
    assert comparison.winner == "baseline"


def test_the_winner_is_decided_by_the_mean_ratio_of_perplexities(tmp_path):
    """Seven perplexities are 5 % worse; the eighth, a large one, is a little better and dominates the mean."""
    for seed in range(8):
        baseline_perplexity, freeze_perplexity = (1000.0, 995.0) if seed == 7 else (10.0, 10.5 + seed / 100)
        language_run(tmp_path, "baseline", seed, math.log(baseline_perplexity))
        language_run(tmp_path, "oelm-freeze", seed, math.log(freeze_perplexity))
    comparison = comparison_of(analyse([tmp_path]))
    assert comparison.difference.mean < 0 < comparison.change.mean
    assert comparison.conclusive
    assert comparison.winner == "baseline"


@pytest.mark.parametrize("more_correct", [2, 60, 0])
def test_pairs_with_equal_differences_decide_nothing(tmp_path, more_correct):
    """Every seed answers the same number of examples more correctly; only rounding makes the differences unequal."""
    for seed, correct in enumerate((798, 801, 805)):
        classification_run(tmp_path, "baseline", seed, correct / 872)
        classification_run(tmp_path, "oelm-freeze", seed, (correct + more_correct) / 872)
    analysis = analyse([tmp_path])
    comparison = comparison_of(analysis)
    assert comparison.difference.mean == pytest.approx(more_correct / 872)
    assert "no_spread" in note_codes(comparison)
    assert (comparison.p, comparison.adjusted, comparison.alike, comparison.winner, comparison.difference.low) == (
        None,
    ) * 5
    verdicts = {verdict.hypothesis.id: verdict for verdict in analysis.verdicts}
    assert (verdicts["KEEPS-98"].verdict, verdicts["KEEPS-98"].notes[0].code) == ("undecided", "no_spread")
    assert {replication.verdict for replication in analysis.replications} <= {"undecided", "not-judged"}


def test_losses_with_equal_differences_decide_nothing(tmp_path):
    for seed in range(3):
        language_run(tmp_path, "baseline", seed, 3.0 + seed / 10)
        language_run(tmp_path, "oelm-freeze", seed, 3.2 + seed / 10)
    analysis = analyse([tmp_path])
    comparison = comparison_of(analysis)
    assert (comparison.no_spread, comparison.adjusted, comparison.alike, comparison.winner) == (True, None, None, None)
    assert {verdict.verdict for verdict in analysis.verdicts if verdict.hypothesis.against} == {"undecided"}


def test_arms_are_alike_only_if_tost_is_significant(tmp_path):
    for seed, noise in enumerate((0.0, 0.003, -0.002, 0.001)):
        language_run(tmp_path, "baseline", seed, 3.0)
        language_run(tmp_path, "oelm-freeze", seed, 3.0 + noise)
        language_run(tmp_path, "oelm-random", seed, 3.0 + 40 * noise)
    analysis = analyse([tmp_path])
    alike, noisy = comparison_of(analysis), comparison_of(analysis, "oelm-random")
    assert alike.alike < 0.05
    assert alike.winner is None
    assert noisy.alike > 0.05
    assert noisy.winner is None


def four_arms(folder, **settings):
    """Write a baseline and four arms that are a little worse, with three seeds each."""
    for seed, noise in enumerate((0.0, 0.01, -0.01)):
        language_run(folder, "baseline", seed, 3.0, **settings)
        for index, method in enumerate(("oelm-freeze", "oelm-random", "oelm-core", "identity-key")):
            language_run(folder, method, seed, 3.05 + index / 50 + noise, **settings)


def test_p_values_are_corrected_over_all_arms_of_a_setup(tmp_path):
    four_arms(tmp_path)
    analysis = analyse([tmp_path])
    raw = sorted(comparison.ratio.p for comparison in analysis.comparisons)
    adjusted = sorted(comparison.adjusted for comparison in analysis.comparisons)
    assert len(raw) == 4
    assert adjusted[0] == pytest.approx(4 * raw[0])


def test_other_setups_in_a_report_do_not_change_verdicts(tmp_path):
    four_arms(tmp_path / "short")
    four_arms(tmp_path / "long", steps=800)

    def verdicts(folder):
        comparisons = analyse([folder]).comparisons
        return [(comparison.arm, comparison.adjusted, comparison.alike) for comparison in comparisons]

    one_setup, both_setups = verdicts(tmp_path / "short"), verdicts(tmp_path)
    assert len(both_setups) == 2 * len(one_setup)
    assert set(one_setup) <= set(both_setups)


def test_step_times_of_runs_that_shared_a_gpu_decide_nothing(tmp_path):
    note = "two runs shared the GPU: step times are not comparable"
    for seed in (0, 1, 2):
        language_run(tmp_path, "oelm-nofreeze", seed, 3.0 + seed / 100, step_seconds=0.02 + seed / 1e4)
        language_run(tmp_path, "oelm-freeze", seed, 3.1 + seed / 90, step_seconds=0.019, notes=(note,) if seed else ())
    (comparison,) = analyse([tmp_path]).times
    assert [item.field for item in comparison.confounds] == ["timing"]
    verdicts = {verdict.hypothesis.id: verdict for verdict in analyse([tmp_path]).verdicts}
    assert (verdicts["H3"].verdict, verdicts["H3"].notes[0].code) == ("undecided", "times_doubtful")


def test_two_runs_are_compared_with_every_field_that_differs(tmp_path):
    freeze = load_run(language_run(tmp_path, "oelm-freeze", 1, 3.1, 2e-3, steps=800))
    baseline = load_run(language_run(tmp_path, "baseline", 0, 3.0, 1e-3))
    fields = {item.field: (item.one, item.other) for item in compare_runs(freeze, baseline).confounds}
    assert fields["optimizer.learning_rate"] == ("0.002", "0.001")
    assert fields["train.max_steps"] == ("800", "400")
    assert fields["seed"] == ("1", "0")
    same_settings = compare_runs(load_run(language_run(tmp_path, "oelm-freeze", 0, 3.1)), baseline)
    assert same_settings.sound
    assert same_settings.ratio.mean == pytest.approx(math.exp(0.1))


def in_memory(template, seed, loss):
    """Return a run like another with another seed and loss, without writing files."""
    result = template.result.model_copy(update={"val_loss": loss, "perplexity": math.exp(loss)})
    return replace(template, config=template.config.model_copy(update={"seed": seed}), result=result)


def test_simulated_runs_with_no_true_difference_give_intervals_that_cover_it(tmp_path):
    """1,500 studies of 3 seeds each, whose arms differ by noise alone; the coverage has a standard error of 0.0056."""
    templates = {name: load_run(language_run(tmp_path, name)) for name in ("baseline", "oelm-freeze")}
    generator = np.random.default_rng(0)
    covered = 0
    for _ in range(1500):
        loss_of_seed = generator.normal(3.0, 0.05, 3)
        arms = []
        for name, template in templates.items():
            losses = [float(loss_of_seed[seed] + generator.normal(0, 0.01)) for seed in range(3)]
            arms.append(Arm(name, ((1e-3, tuple(in_memory(template, s, loss) for s, loss in enumerate(losses))),)))
        task = TaskRecord(kind="language", name="language")
        setup = Setup(task=task, dataset="noise", settings=(), arms=tuple(arms))
        comparison = headline(setup, arms[1], arms[0], setup.measure)
        covered += comparison.ratio.low <= 1 <= comparison.ratio.high
    assert covered / 1500 == pytest.approx(0.95, abs=0.02)


def test_the_flop_bound_is_the_ratio_of_the_recorded_flops(tmp_path):
    runs = [load_run(language_run(tmp_path, method)) for method in ("oelm-freeze", "baseline")]
    frozen, total = runs[0].result.parameters.frozen, runs[0].result.parameters.total
    assert flop_ratio(*runs) == pytest.approx(1 - frozen / total / 3), "a frozen weight costs two thirds"
    change(runs[1].path, "result.json", flops_per_token=None)
    assert flop_ratio(runs[0], load_run(runs[1].path)) is None


def test_forty_runs_are_grouped_into_their_arms(tmp_path):
    for seed in range(5):
        for rate in (1e-3, 2e-3):
            for method in ("baseline", "oelm-freeze", "oelm-random", "oelm-core"):
                language_run(tmp_path, method, seed, 3.0 + seed / 100 + rate, rate)
    (group,) = group_runs(load_runs([tmp_path]).runs)
    (setup,) = group.setups
    assert [len(arm.runs) for arm in setup.arms] == [10, 10, 10, 10]


def test_runs_with_another_tokenizer_are_in_another_setup(tmp_path):
    for seed, data in enumerate(({"tokenizer": "a"}, {"tokenizer": "b"}, {"tokenizer": "b", "marks": "c"})):
        classification_run(tmp_path, seed=seed, environment={"data": data})
    (group,) = group_runs(load_runs([tmp_path]).runs)
    assert [len(setup.runs) for setup in group.setups] == [1, 1, 1]
