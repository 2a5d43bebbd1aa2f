"""The replication: the study's recipe on stand-ins, arms that share a setup, its plan, and the script that runs it."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from oelm.analysis.run import comparable
from oelm.base.strict import flat
from oelm.lab.experiment import find_experiment, shipped_experiments
from oelm.lab.plan import PlannedRun, Request, plan_runs
from tests.support.lab import ROOT, lab, refusal

PLAN = ROOT / "results" / "replication-plan.yaml"
SCRIPT = ROOT / "results" / "replicate.sh"
PARTS = {part["part"]: part for part in yaml.safe_load(PLAN.read_text())["exploration"]["parts"]}
# Tokens of GPT-2's vocabulary in the training text of WikiText-103, and in the one that stands in for it.
WIKITEXT_103, WIKI = 117_920_140, 36_888_424


def runs(name: str, **request: object) -> list[PlannedRun]:
    return plan_runs([find_experiment(name)], Request(**request))


def settings(run: PlannedRun, *without: str) -> dict[str, object]:
    """Return what all arms of a setup share, as the analysis sees it; `without` are fields left out."""
    varying = ("method", "optimizer.learning_rate", *without)
    return {name: value for name, value in flat(comparable(run.config)).items() if not name.startswith(varying)}


@pytest.mark.parametrize(
    ("name", "published", "without"),
    [
        ("replicate-wiki", ("GPT-06", "GPT-07"), ("train.max_steps",)),
        ("replicate-books", ("GPT-04", "GPT-05"), ("train.max_steps",)),
        (
            "replicate-stories",
            ("GPT-01", "GPT-02", "GPT-03"),
            ("train.max_steps", "optimizer.warmup_steps", "eval.every"),
        ),
    ],
)
def test_a_stand_in_has_the_published_recipe(name, published, without):
    """The same method and rate, and all other settings but those that its notes give."""
    ours = {(run.config.method.name, run.config.optimizer.learning_rate): run for run in runs(name)}
    for run in (run for experiment in published for run in runs(experiment)):
        same = ours[run.config.method.name, run.config.optimizer.learning_rate]
        assert settings(same, *without) == settings(run, *without)
        assert same.config.train.max_steps != run.config.train.max_steps


def test_the_stand_in_is_read_as_often_as_wikitext_103():
    (published,) = runs("GPT-06")
    for run in runs("replicate-wiki"):
        assert run.config.train.max_steps == round(published.config.train.max_steps * WIKI / WIKITEXT_103)
    assert any(f"{WIKI:,}" in note for note in find_experiment("replicate-wiki").notes)


@pytest.mark.parametrize("name", ["replicate-share", "replicate-unfreeze", "replicate-part-rates"])
def test_the_variants_are_in_the_setup_of_their_reference(name):
    reference = next(run for run in runs("replicate-wiki") if run.config.optimizer.learning_rate == 1e-3)
    for run in runs(name):
        assert run.config.optimizer.learning_rate == 1e-3
        assert settings(run, "optimizer.multipliers") == settings(reference, "optimizer.multipliers")


@pytest.mark.parametrize("task", ["sst2", "mnli", "xnli"])
def test_all_arms_of_the_encoder_share_a_setup_and_rates(task):
    body, instead = runs(f"mpnet-{task}"), runs(f"mpnet-{task}-instead")
    assert len({str(settings(run)) for run in (*body, *instead)}) == 1
    rates = [{run.config.optimizer.learning_rate for run in part} for part in (body, instead)]
    assert {2e-5, 1e-4} < rates[0], "the study's two, inside the grid"
    assert len(rates[0] & rates[1]) >= 2
    assert len({run.config.method.name for run in (*body, *instead)}) == 9
    assert (body[0].config.train.batch_size, body[0].config.train.epochs) == (16, 3)


def test_muon_is_all_that_differs_from_adamw():
    for arm in ("modern", "identity", "latent"):
        muon, adamw = runs(f"robust-muon-{arm}")[0], runs(f"size-medium-{arm}")[0]
        without = ("optimizer.name", "model.name", "model.fields.latent")  # the identity's latent is the width
        assert settings(muon, *without) == settings(adamw, *without)
        assert muon.config.optimizer.name == "muon"
        assert muon.config.method == adamw.config.method


def test_every_experiment_says_that_it_stands_in():
    for name in ("replicate-wiki", "replicate-books", "mpnet-sst2", "mpnet-mnli", "mpnet-xnli"):
        assert any("stand in for" in note or "stands in for" in note for note in find_experiment(name).notes), name


# The plan and its script


def test_the_plan_names_every_experiment_once_and_has_nothing_to_confirm():
    named = [name for part in PARTS.values() for name in part["experiments"]]
    prefixes = ("replicate-", "mpnet-", "decoder-", "size-medium-", "robust-muon-")
    shipped = [e.id for e in shipped_experiments().values() if e.id.startswith(prefixes) and not e.abstract]
    assert sorted(named) == sorted(shipped)
    assert "no confirmation part" in refusal("matrix", PLAN)


@pytest.fixture
def script(tmp_path):
    """Return a function that runs the script with a command in place of oelm."""

    def run(command: str, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        stand_in = tmp_path / "oelm"
        stand_in.write_text(f"#!/bin/sh\n{command}\n")
        stand_in.chmod(0o755)
        environment = {**os.environ, "OELM": str(stand_in), "RUNS": str(tmp_path / "runs"), **variables}
        return subprocess.run([SCRIPT, *arguments], env=environment, capture_output=True, text=True, cwd=tmp_path)

    return run


def test_the_scripts_commands_are_the_plans(script):
    for name, part in PARTS.items():
        result = script('for word; do printf "%s\\n" "$word"; done', name, RECORD="train.graphs=auto")
        assert result.returncode == 0, result.stderr
        words = result.stdout.splitlines()
        assert words[1 : words.index("--data")] == part["experiments"]
        assert words[words.index("--seeds") + 1] == str(part["seeds"])
        checked = lab(*words, "--dry-run")
        assert checked.exit_code == 0, checked.output
        assert "all valid" in checked.stdout


def test_options_choose_other_runs(script):
    result = script('echo "$@"', "muon", "--axis", "seed=3,4", "--lr-grid", "8e-3")
    words = shlex.split(result.stdout)
    assert "--seeds" not in words
    assert words[-4:] == ["--axis", "seed=3,4", "--lr-grid", "8e-3"]
    for part in ("", "all"):
        assert script("exit 0", *([part] if part else [])).returncode == 2


def test_a_part_that_is_cut_is_asked_once_to_save_and_goes_on_with_the_next_call(script, tmp_path):
    trap = f'trap "echo asked >> {tmp_path}/asked; exit 75" TERM'
    noting = f"{trap}; for second in $(seq 600); do sleep 0.1; done"
    assert script(noting, "wiki", LIMIT="1").returncode == 75
    assert (tmp_path / "asked").read_text() == "asked\n"
    assert script("exit 3", "wiki").returncode == 3, "an error stays one"
    assert script("exit 75", "wiki").returncode == 75


def test_records_of_finished_runs_are_archived_in_each_call(script, tmp_path):
    archive = str(tmp_path / "records")
    noting = f'echo "$@" >> {tmp_path}/commands; [ "$1" = archive ] || exit 75'
    assert script(noting, "wiki", ARCHIVE=archive).returncode == 75
    assert len((tmp_path / "commands").read_text().splitlines()) == 1, "nothing has finished"
    (tmp_path / "runs/wiki/a/b/seed-0").mkdir(parents=True)
    Path(tmp_path / "runs/wiki/a/b/seed-0/result.json").write_text("{}")
    assert script(noting, "wiki", ARCHIVE=archive).returncode == 75
    last = (tmp_path / "commands").read_text().splitlines()[-1]
    assert last == f"archive {tmp_path}/runs/wiki --out {archive}/wiki"
