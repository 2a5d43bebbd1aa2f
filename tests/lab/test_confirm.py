"""Plans of studies: what they may say, the runs that a matrix makes of them, and what these record."""

import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from oelm.data import prepare, stories
from oelm.errors import LabError
from oelm.lab.confirm import experiment_files, load_study, made_otherwise, named_plan, plan_study
from oelm.lab.plan import Request
from oelm.runs.confirmation import StudyPlan, load_plan
from oelm.training.engine import train
from tests.support.lab import ROOT, lab, refusal
from tests.support.plans import group, hypothesis, write_plan
from tests.support.training import tiny, token_folder

FAMILY = [hypothesis("identity", "identity-key"), hypothesis("frozen", "oelm-freeze", test="welch")]


def changed(path, **fields):
    """Change fields of a plan's confirmation; return the plan's path."""
    content = yaml.safe_load(path.read_text())
    content["confirmation"].update(fields)
    path.write_text(yaml.safe_dump(content))
    return path


def test_the_projects_own_plan_is_valid():
    StudyPlan.model_validate(yaml.safe_load((ROOT / "results" / "plan.yaml").read_text()))


def test_a_plan_runs_its_experiments_with_its_methods_and_seeds(tmp_path):
    runs = [
        {"experiment": "conf.yaml", "seeds": 3, "methods": ["baseline", "identity-key"]},
        {"experiment": "conf.yaml", "seeds": [1, 7], "methods": ["oelm-freeze", "baseline"]},
    ]
    study = load_study(write_plan(tmp_path, FAMILY, runs=runs))
    planned = plan_study(study, Request(output=str(tmp_path / "runs")))
    expected = {f"conf/{method}/seed-{seed}" for method in ("baseline", "identity-key") for seed in range(3)}
    expected |= {"conf/oelm-freeze/seed-1", "conf/oelm-freeze/seed-7", "conf/baseline/seed-7"}
    assert {run.name for run in planned} == set(study.configs) == expected
    assert len(planned) == len(expected)
    assert {run.config.log.plan for run in planned} == {study.mark}
    assert study.mark.name == "plan.yaml"
    # The mark changes nothing else: the same runs without a plan have the same ids.
    assert {run.config.id for run in planned} == {config.id for config in study.configs.values()}


def test_what_a_plan_shows_may_change_after_its_runs(tmp_path):
    before = load_study(write_plan(tmp_path, FAMILY))
    after = load_study(write_plan(tmp_path, FAMILY, shown=[group(identity_key="identity key")]))
    assert (before.shown, before.sha256) == ((), after.sha256)
    assert after.shown[0].names == {"conf/baseline": "the reference", "conf/identity-key": "identity key"}


@pytest.mark.parametrize(
    ("shown", "problem"),
    [
        (group(identity_kex="x"), "shown, A tiny GPT 'conf/identity-kex' is not among the runs. Did you mean"),
        (group(baseline="x"), "conf/baseline is the reference and one of the arms"),
        (group(), "shown.0.arms"),
    ],
)
def test_what_a_plan_shows_must_be_run(tmp_path, shown, problem):
    with pytest.raises(LabError, match=re.escape(problem)):
        load_study(write_plan(tmp_path, FAMILY, shown=[shown]))


def test_a_rehearsal_at_smoke_scale_has_no_mark(tmp_path):
    names = {"arm": "ABC-tinystories/oelm-freeze", "against": "ABC-tinystories/oelm-nofreeze"}
    runs = [{"experiment": "abc-tinystories", "seeds": 2}]
    study = load_study(write_plan(tmp_path, [{**FAMILY[0], **names}], runs=runs, tokens="as published"))
    planned = plan_study(study, Request("smoke"))
    assert {run.name.partition("/")[0] for run in planned} == {"ABC-tinystories-smoke"}
    assert {run.config.log.plan for run in planned} == {None}


def test_the_hash_is_of_the_confirmation_as_data(tmp_path):
    path = write_plan(tmp_path, FAMILY)
    *_, sha256 = load_plan(path)
    content = yaml.safe_load(path.read_text())
    path.write_text("# a comment\n" + json.dumps({"confirmation": content["confirmation"], "exploration": {"more": 1}}))
    assert load_plan(path)[2] == sha256
    assert load_plan(changed(path, alpha=0.01))[2] != sha256


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"alpah": 0.05}, "confirmation.alpah: unknown key. Did you mean 'alpha'? Known keys: data, tokens"),
        ({"runs": [{"experiment": "conf.yaml", "seed": 3}]}, "runs.0.seed: unknown key. Did you mean 'seeds'?"),
        ({"runs": [{"experiment": "conf.yaml", "seeds": [1, 1]}]}, "list each value once"),
        ({"runs": []}, "runs: "),
        ({"alpha": 0.7}, "alpha: "),
        ({"judges": "train"}, "judges: "),
        ({"tokens": True}, "tokens: "),
        ({"tokens": 65_000_000}, "tokens is 65,000,000, but conf/baseline/seed-0 is trained on 819,200"),
        ({"runs": [{"experiment": "no-such", "seeds": 3}]}, "unknown experiment 'no-such'"),
        ({"runs": [{"experiment": "../conf.yaml", "seeds": 3}]}, "a file in the folder of the plan"),
        (
            {"runs": [{"experiment": "conf.yaml", "seeds": 3, "methods": ["identity_key"]}]},
            "Did you mean 'identity-key'",
        ),
        (
            {"hypotheses": [hypothesis("a", "identity-keys")]},
            "'conf/identity-keys' is not among the runs. Did you mean",
        ),
        ({"hypotheses": [hypothesis("a", "baseline")]}, "arm and against are both conf/baseline"),
        ({"hypotheses": FAMILY[:1] * 2}, "two hypotheses have the id 'identity'"),
        ({"hypotheses": [hypothesis(f"h{n}", "oelm-freeze") for n in range(7)]}, "7 hypotheses; a plan has at most 6"),
        ({"hypotheses": [hypothesis("a", "oelm-freeze", margn=1)]}, "hypotheses.0.margn: unknown key"),
        ({"hypotheses": [hypothesis("a", "oelm-freeze", test="t")]}, "hypotheses.0.test: "),
        ({"runs": [{"experiment": "conf.yaml", "seeds": 1}]}, "needs 2 seeds or more"),
    ],
)
def test_a_plan_that_cannot_be_right_is_refused_before_anything_runs(tmp_path, fields, message):
    path = changed(write_plan(tmp_path, FAMILY), **fields)
    for command in (("matrix", path, "--out", tmp_path / "runs"), ("report", tmp_path, "--plan", path, "--out", "no")):
        error = refusal(*command)
        assert str(path) in error
        assert message in error
    assert not (tmp_path / "runs").exists()


def test_what_would_change_a_plan_is_refused(tmp_path):
    path = write_plan(tmp_path, FAMILY)
    assert "--seeds would change it" in refusal("matrix", path, "--seeds", 2)
    assert "optimizer.learning_rate would change it" in refusal("matrix", path, "--lr-grid", "1e-3")
    assert "train.max_steps=3 would change it" in refusal("matrix", path, "train.max_steps=3")
    assert "a plan says itself what is run" in refusal("matrix", path, "GPT-02")
    assert "it is run by `oelm matrix" in refusal("run", path)
    assert "has no confirmation part yet" in refusal("matrix", ROOT / "results" / "plan.yaml")
    assert "name it with --plan" in refusal("report", tmp_path, "--plan-any", "--out", tmp_path / "out")
    study = load_study(path)
    assert plan_study(study, Request(overrides=("log.every=5",)))[0].config.log.every == 5


def test_a_plan_is_told_from_an_experiment_by_its_content(tmp_path):
    path = write_plan(tmp_path, FAMILY)
    assert named_plan([str(path)]) == path
    assert named_plan([str(tmp_path / "conf.yaml"), "GPT-02"]) is None
    assert experiment_files(path) == [tmp_path / "conf.yaml"]
    with pytest.raises(LabError, match="a plan says itself what is run"):
        named_plan([str(tmp_path / "conf.yaml"), str(path)])


def test_a_dry_run_lists_the_hypotheses_and_the_runs(tmp_path):
    result = lab("matrix", write_plan(tmp_path, FAMILY), "--dry-run")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("identity: conf/identity-key against conf/baseline, 6 pairs (paired); margin +2 %")
    assert "6 and 6 seeds (welch)" in result.stdout
    assert sum(line.startswith("conf/") for line in lines) == 30
    assert lines[-1] == "30 runs, all valid; their data was not read"


def small_plan(folder, tokens):
    """Write a plan of two arms with two seeds, whose runs take a fraction of a second."""
    fields = {key: value for key, value in tiny(folder).items() if key != "output"}
    fields["data"] = {"path": str(tokens), "sequence_length": 32}
    path = write_plan(folder, FAMILY[:1], tokens="3 k", runs=[{"experiment": "conf.yaml", "seeds": 2}])
    content = {"config": fields, "axes": {"method": ["baseline", "identity-key"]}}
    (folder / "conf.yaml").write_text(yaml.safe_dump(content))
    return path


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    """Prepare stories with a test text."""
    folder = tmp_path_factory.mktemp("tokens")
    texts = list(stories(0, 70))
    for name, part in (("train", texts[:40]), ("val", texts[40:55]), ("test", texts[55:])):
        (folder / f"{name}.txt").write_text("".join(f"{text}\n<|endoftext|>\n" for text in part), encoding="utf-8")
    files = {name: folder / f"{name}.txt" for name in ("val", "test")}
    prepare(folder / "train.txt", folder / "out", train_bpe=300, workers=1, synthetic=True, **files)
    return folder / "out"


def test_data_without_the_text_that_judges_is_refused(tmp_path, tokens):
    study = load_study(small_plan(tmp_path, token_folder()))
    with pytest.raises(LabError, match=r"judges is test, but .* has no test text"):
        plan_study(study, Request())
    assert len(plan_study(study, Request(data=str(tokens)))) == 4
    with pytest.raises(LabError, match="builtin:stories has no test text"):
        plan_study(study, Request(data="builtin:stories"))


def test_a_run_that_was_begun_without_the_plan_does_not_become_one_of_it(tmp_path, tokens):
    """A finished run and an interrupted one are named before the matrix starts, and keep what they recorded."""
    study = load_study(small_plan(tmp_path, tokens))
    planned = plan_study(study, Request(output=str(tmp_path / "runs")))
    assert made_otherwise(study, planned) == []
    unmarked, marked = planned[0].config, planned[1].config
    train(unmarked.model_copy(update={"log": unmarked.log.model_copy(update={"plan": None})}), quiet=True)
    train(marked, quiet=True)
    assert made_otherwise(study, planned) == planned[:1]
    assert json.loads((marked.folder / "environment.json").read_text())["plan"] == study.mark.model_dump()
    (unmarked.folder / "result.json").unlink()  # as if it had been interrupted after its last checkpoint
    train(unmarked, quiet=True)
    assert json.loads((unmarked.folder / "environment.json").read_text())["plan"] is None
    assert made_otherwise(study, planned) == planned[:1]


def documented() -> tuple[list[str], list[list[str]]]:
    """Return the files and the commands of the example in docs/lab.md."""
    guide = (ROOT / "docs" / "lab.md").read_text(encoding="utf-8")
    blocks = re.findall(r"```(yaml)?\n(.*?)```", guide.split("## Planning a study")[1].split("\n## ")[0], re.DOTALL)
    commands = "\n".join(text for language, text in blocks if not language).splitlines()
    return [text for language, text in blocks if language], [shlex.split(line, comments=True) for line in commands]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_the_example_of_the_guide_goes_from_its_plan_to_its_report(tmp_path, monkeypatch):
    """Then without one of its runs, and then under another version of the plan."""
    monkeypatch.chdir(tmp_path)
    texts = list(stories(0, 120))
    for name, part in (("train", texts[:80]), ("val", texts[80:100]), ("test", texts[100:])):
        Path(f"{name}.txt").write_text("".join(f"{text}\n<|endoftext|>\n" for text in part), encoding="utf-8")
    files, commands = documented()
    for file in files:
        Path(re.match(r"# (\S+\.yaml)", file)[1]).write_text(file, encoding="utf-8")
    for command in commands:
        result = lab(*command[1:])
        assert result.exit_code == 0, (command, result.output)
        if command[:2] == ["oelm", "matrix"] and "--dry-run" not in command:
            assert "8 finished" in result.stdout
            assert "next: oelm report runs/study --plan plan.yaml --out report" in result.stdout
    plan = json.loads(Path("report/results.json").read_text())["plan"]
    assert (len(plan["finished"]), plan["missing"], plan["apart"]) == (8, [], [])
    assert all(claim["verdict"] in ("holds", "not-shown", "does-not-hold") for claim in plan["hypotheses"])
    assert all(claim["over_texts"] is not None for claim in plan["hypotheses"])
    page = Path("report/report.html").read_text()
    assert page.index("The planned hypotheses") < page.index("Summary (descriptive)")
    shutil.rmtree("runs/study/tiny-keys/identity-key/seed-1")
    report = ("report", "runs/study", "--plan", "plan.yaml", "--out", "report", "--formats", "md")
    output = lab(*report).stdout
    assert "identity-key: not run yet" in output
    assert "oelm matrix plan.yaml --out runs/study" in " ".join(output.split())
    changed(Path("plan.yaml"), alpha=0.01)
    assert "7 runs in runs/study" in lab("matrix", "plan.yaml", "--out", "runs/study", "--dry-run").stderr
    lab(*report)
    plan = json.loads(Path("report/results.json").read_text())["plan"]
    assert ({run["why"] for run in plan["apart"]}, len(plan["apart"])) == ({"version"}, 7)
    assert {claim["verdict"] for claim in plan["hypotheses"]} == {"not-run"}
