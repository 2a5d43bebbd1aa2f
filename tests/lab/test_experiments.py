"""The named experiments: each loads, expands and dry-runs; missing data is named; bad input is refused."""

from pathlib import Path

import pytest
import yaml

from oelm.config import RunConfig, parse_override
from oelm.errors import LabError, OelmError
from oelm.lab import dry_run as dryrun
from oelm.lab import preflight
from oelm.lab.dry_run import dry_run
from oelm.lab.experiment import find_experiment, load_experiment, runnable_experiments, shipped_experiments
from oelm.lab.plan import Request, parse_values, plan_runs, run_name
from oelm.lab.preflight import known_requirements, missing
from oelm.method.apply import apply
from oelm.models.flops import train_flops_per_token
from oelm.models.gpt import OelmGPTForCausalLM
from oelm.runs import published
from tests.support.lab import experiment_file, lab, refusal

# The experiments for the rows that the original study published, and for the controls that it lacks.
ROWS = [f"GPT-0{n}" for n in range(1, 8)] + [
    *("XNLI-01", "XNLI-02", "SST-2-01", "SST-2-02", "SST-2-03", "MNLI-01", "MNLI-02"),
    *("ABC-tinystories", "GPT-GLOBAL", "GPT-IMDB", "GPT-AGNEWS", "GPT-SST2", "GPT-XNLI", "GPT-MNLI"),
    *("freeze-ratio", "trained-layers", "progressive", "layer-rates", "sizes", "pretrain-finetune"),
]
NAMES = [experiment.id for experiment in runnable_experiments()]


def runs(name: str, **request):
    return plan_runs([find_experiment(name)], Request(**request))


def config(name: str, **request) -> RunConfig:
    (run,) = runs(name, **request)
    return run.config


# Shipped experiments


def test_every_published_row_has_its_experiment():
    assert set(ROWS) <= set(NAMES)
    assert all(experiment.asks and experiment.title for experiment in runnable_experiments())


@pytest.mark.parametrize("scale", ["full", "smoke"])
@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_dry_runs(name, scale):
    """The config is valid, the axes give distinct runs, and the method fits the model, at both scales."""
    planned = runs(name, scale=scale)
    assert len({run.folder for run in planned}) == len(planned) == len({run.config.id for run in planned})
    for run in planned:
        checked = dry_run(run)
        assert checked.parameters > 0
        method = run.config.method
        assert (checked.matrices > 0) == any(not part.untouched for part in method.matrices.values())


def test_a_dry_run_uses_the_model_fields(tmp_path):
    def checked(**fields):
        file = experiment_file(tmp_path, config={"model": {"name": "random:gpt2", "fields": fields}})
        (run,) = runs(str(file))
        return dry_run(run)

    assert checked(n_layer=6).parameters > checked().parameters
    assert checked(n_layer=6).flops_per_token > checked().flops_per_token
    with pytest.raises(LabError, match=r"gpt2.*'n_layerz'.*'n_layer'"):
        checked(n_layerz=6)


@pytest.mark.parametrize("name", NAMES)
def test_the_smoke_scale_needs_nothing_and_is_small(name):
    for run in runs(name, scale="smoke"):
        assert missing(run) == []
        assert run.config.train.max_steps <= 30 or name == "demo"
        assert run.config.experiment.startswith(("pretrain-smoke", f"{name}-smoke"))


@pytest.mark.parametrize("name", ["sizes", "trend-size"])
@pytest.mark.parametrize("scale", ["full", "smoke"])
def test_an_experiment_on_sizes_has_models_of_different_sizes(name, scale):
    for method in ("baseline", "oelm-freeze"):
        of_method = [run for run in runs(name, scale=scale) if run.config.method.name == method]
        assert len({dry_run(run).parameters for run in of_method}) == len(of_method) > 1


@pytest.mark.parametrize("name", [name for name in published.load().experiments if name in NAMES])
def test_an_experiment_has_the_published_settings(name):
    """Method and settings agree with those of the published figure, field by field."""
    published_row = published.load()[name]
    run = config(name)
    assert run.method.name == published_row.method
    assert shipped_experiments()[name].published == (name,)
    for field, value in published_row.setup.items():
        setting = run.to_dict()
        for part in field.split("."):
            setting = setting.get(part) if isinstance(setting, dict) else None
        if setting is not None:
            assert setting in published.by_source(value).values(), field


def test_runs_record_when_they_reach_the_published_perplexities():
    """Without targets no time to a perplexity can be drawn, and those of another data set are of no use."""
    by_data: dict[str, set[float]] = {}
    for row in published.load().experiments.values():
        if "perplexity" in row.figures:
            by_data.setdefault(row.dataset, set()).add(row.figures["perplexity"])
    assert set(by_data) == {"tinystories", "openwebtext", "wikitext-103"}
    on_published_data = [experiment.id for experiment in runnable_experiments() if experiment.data in by_data]
    assert {"GPT-01", "GPT-07", "ABC-openwebtext", "rates-wikitext-103"} <= set(on_published_data)
    for name in on_published_data:
        perplexities = by_data[shipped_experiments()[name].data or ""]
        for run in runs(name):
            targets = run.config.eval.targets
            assert perplexities <= set(targets)
            assert list(targets) == sorted(targets, reverse=True)
            assert max(targets) <= max(perplexities) or run.experiment.data == "tinystories"


def test_every_published_figure_is_named_by_an_experiment():
    named = {name for experiment in runnable_experiments() for name in experiment.published}
    timings = {"BERT-TIME-01", "BERT-TIME-02"}  # step times, which `oelm bench` measures
    assert set(published.load().experiments) - timings <= named
    assert named <= set(published.load().experiments)


def test_the_groups_differ_only_in_the_method():
    first, *others = [run.config.to_dict() for run in runs("ABC-tinystories")]
    for other in others:
        assert {key for key in first if first[key] != other[key]} == {"method"}


def test_the_data_of_every_experiment_is_described():
    assert {experiment.data for experiment in runnable_experiments()} - {None} <= set(known_requirements())


def test_the_list_shows_questions_and_published_figures():
    shown = lab("experiments").stdout
    for experiment in runnable_experiments():
        assert experiment.asks in shown
    assert "perplexity 4.69" in next(line for line in shown.splitlines() if " GPT-02 " in line)
    assert "accuracy 91.28%" in shown


def test_one_experiment_is_shown_in_full():
    shown = yaml.safe_load(lab("experiments", "gpt-05").stdout)
    assert shown["id"] == "GPT-05"
    assert shown["config"]["data"]["path"] == "data/openwebtext"
    assert shown["config"]["model"]["name"] == "gpt:medium-512", "inherited fields are shown"
    assert any("1e-3" in note for note in shown["notes"])


# Planning runs


def test_methods_alternate_and_seeds_are_the_outermost_loop():
    names = [
        run.name for run in plan_runs([find_experiment("GPT-01"), find_experiment("GPT-02")], Request(seeds=(0, 1)))
    ]
    assert names == [
        "GPT-01/baseline/seed-0",
        "GPT-02/oelm-freeze/seed-0",
        "GPT-01/baseline/seed-1",
        "GPT-02/oelm-freeze/seed-1",
    ]
    grid = plan_runs(
        [find_experiment("ABC-tinystories")], Request(seeds=(0, 1), axes={"optimizer.learning_rate": (1e-4, 3e-4)})
    )
    assert [run.config.method.name for run in grid[:3]] == ["baseline", "oelm-nofreeze", "oelm-freeze"]
    assert [run.config.seed for run in grid] == [0] * 6 + [1] * 6


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({}, "X"),
        ({"optimizer.learning_rate": 1e-3}, "X-lr-1e-3"),
        ({"optimizer.learning_rate": 0.00025}, "X-lr-2.5e-4"),
        ({"optimizer.learning_rate": 0.02, "data.fraction": 0.1}, "X-lr-0.02-fraction-0.1"),
        ({"optimizer.learning_rate": 1e30}, "X-lr-1e30"),
        ({"model.name": "gpt:tiny"}, "X-model-gpt-tiny"),
        ({"method.layers": "except-first:2"}, "X-layers-except-first-2"),
        ({"seed": 1, "method": "baseline", "data.path": "d", "log.every": 5, "output": "o"}, "X"),
        ({"method.schedule.steps": [10, 20]}, "X-steps-10-20"),
        ({"optimizer.multipliers": {"v": 3.0, "o": 0.5}}, "X-multipliers-v-3-o-0.5"),
        ({"optimizer.multipliers": {}}, "X-multipliers-none"),
    ],
)
def test_a_run_is_named_by_the_fields_that_were_changed(values, name):
    assert run_name("X", "full", values) == name
    RunConfig(experiment=run_name("X", "smoke", {"model.name": "../../etc:passwd " * 30}))


def test_overrides_change_the_run_and_its_name(tmp_path):
    run = config("GPT-02", overrides=("train.max_steps=50", "checkpoint.every=7"), data="my/tokens", output="elsewhere")
    assert (run.train.max_steps, run.checkpoint.every, run.data.path) == (50, 7, "my/tokens")
    assert run.experiment == "GPT-02-steps-50"
    assert str(run.folder) == "elsewhere/GPT-02-steps-50/oelm-freeze/seed-0"
    changed = config("GPT-02", overrides=("method.layers=first:2",))
    assert (changed.method.layers, changed.method.q.init) == ("first:2", "qr"), "the preset with one field changed"


def test_an_override_selects_one_value_of_an_axis():
    assert [run.config.method.name for run in runs("ABC-tinystories", overrides=("method=oelm-freeze",))] == [
        "oelm-freeze"
    ]


def test_runs_that_others_start_from_are_planned_first():
    planned = runs("pretrain-finetune", scale="smoke", seeds=(3,))
    assert len(planned) == 6
    for run in planned:
        if run.starts_from is not None:
            assert planned.index(run.starts_from) < planned.index(run)
            assert run.config.model.name == str(run.starts_from.folder / "plain")
            assert run.config.seed == run.starts_from.config.seed == 3
    with pytest.raises(LabError, match="cannot be set here"):
        runs("pretrain-finetune", overrides=("method=baseline",))


def test_values_of_an_axis_are_parsed():
    assert parse_values("3e-4,1e-3") == (3e-4, 1e-3)
    assert parse_values("1,0.5,qk") == (1, 0.5, "qk")
    assert parse_values("[first:1, last:1]") == ("first:1", "last:1")


@pytest.mark.parametrize("text", ["3e-4", "-3e-4", "1_0", "1_0e2", "0.5", "qk", "last:1", "nan", "2e"])
def test_an_axis_and_an_override_parse_a_value_in_the_same_way(text):
    """Otherwise a run's folder would be named by another value than the run has."""
    assert parse_values(text) == (parse_override(f"a.b={text}")[1],)


# Users' experiments


def test_a_file_may_extend_a_shipped_experiment(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump({"extends": "ABC-tinystories", "axes": {"seed": [0, 1, 2]}, "notes": ["own"]}))
    experiment = load_experiment(file)
    assert experiment.id == "mine"
    assert len(plan_runs([experiment], Request())) == 9
    assert (experiment.title, experiment.published) == ("", ()), "not inherited"


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"extends": "GPT-99"}, "extends 'GPT-99'"),
        ({"id": "GPT-01"}, "'GPT-01' is a shipped experiment"),
        ({"id": "a/b"}, "id: String should match pattern"),
        ({"axis": {"seed": [1]}}, "axis: unknown key. Did you mean 'axes'?"),
        ({"config": {"seed": 3}}, "seed is not part of an experiment's config"),
        ({"config": {"optimizer": {"learning_rate": 1e-3}}, "axes": {"optimizer.learning_rate": [1e-4]}}, "keep one"),
        ({"config": {"trian": {}}}, "trian: unknown key. Did you mean 'train'?"),
        ({"axes": {"optimizer.learning_rat": [1e-3]}}, "learning_rat: unknown key"),
        ({"axes": {"method": "oelm-freeze"}}, "axes.method: should be a list, such as ['oelm-freeze']"),
        ({"smoke": {"axes": {"seed": 3}}}, "smoke.axes.seed: should be a list, such as [3]"),
        ({"axes": {"seed": []}}, "axis seed has no values"),
        ({"axes": {"seed": [1, 1]}}, "axis seed lists 1 more than once"),
        ({"axes": {"method": ["oelm-freeze", {"preset": "oelm-freeze"}]}}, "give the same run"),
        ({"axes": {"method": ["oelm-freez"]}}, "Did you mean 'oelm-freeze'?"),
        ({"axes": {"log.every": [1, 2]}}, "give the same run"),
        ({"axes": {"train.epochs": [1], "train.max_steps": [5]}}, "train.max_steps and train.epochs"),
    ],
)
def test_a_malformed_experiment_is_refused(tmp_path, content, text):
    file = tmp_path / "mine.yaml"
    file.write_text(yaml.safe_dump(content))
    with pytest.raises(LabError) as error:
        plan_runs([find_experiment(str(file))], Request())
    assert text in str(error.value)


def test_a_missing_or_malformed_file_is_refused(tmp_path):
    assert "cannot be read" in refusal("run", tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("a: [")
    assert "not YAML" in refusal("matrix", tmp_path / "bad.yaml")


def test_a_dry_run_refuses_a_method_that_does_not_fit_its_model(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text(
        yaml.safe_dump({"extends": "GPT-02", "config": {"method": {"preset": "oelm-freeze", "layers": [9]}}})
    )
    assert "layers [9] are out of range" in refusal("run", file, "--dry-run")
    after_the_end = {"preset": "oelm-freeze", "schedule": {"kind": "freeze", "steps": [200_000]}}
    file.write_text(yaml.safe_dump({"extends": "GPT-02", "config": {"method": after_the_end}}))
    assert "past train.max_steps 100000" in refusal("run", file, "--dry-run")


def test_a_dry_run_knows_at_which_step_a_share_of_them_falls(tmp_path):
    """Unless the run is some epochs long: how many steps those are is known with the data alone."""
    fields = {"model": {"name": "gpt:tiny"}, "method": "freeze-early", "train": {"max_steps": 300}}
    (run,) = runs(str(experiment_file(tmp_path, config=fields)))
    assert dry_run(run).changes_at == (30,)
    (run,) = runs(str(experiment_file(tmp_path, config={**fields, "train": {"max_steps": None, "epochs": 2}})))
    assert dry_run(run).changes_at == ()


def test_a_dry_run_of_a_matrix_lists_its_runs():
    shown = lab("matrix", "GPT-01", "GPT-02", "--seeds", "2", "--dry-run").stdout
    (line,) = [line for line in shown.splitlines() if line.startswith("GPT-02/oelm-freeze/seed-1: ")]
    for part in ("44,896,768 parameters", "41,751,040", "12 matrices"):
        assert part in line
    assert "4 runs" in shown


@pytest.mark.parametrize(
    "method", ["baseline", "oelm-freeze", "identity-key", "oelm-core", "lora", "oft", "last-layers"]
)
def test_a_dry_run_counts_like_the_audit_of_the_real_model(method, tmp_path):
    if method in ("lora", "oft"):
        pytest.importorskip("peft", reason="peft is not installed")
    (run,) = runs(str(experiment_file(tmp_path, config={"model": {"name": "gpt:tiny"}, "method": method})))
    checked = dry_run(run)
    model = OelmGPTForCausalLM(dryrun._skeleton(run).config)
    report = apply(model, method)
    assert (checked.parameters, checked.trainable) == (report.total, report.trainable)
    flops = train_flops_per_token(model, run.config.data.sequence_length, run.config.train.batch_size)
    assert checked.flops_per_token == flops
    assert (checked.adapters > 0) == (method in ("lora", "oft"))


# The command line


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "GPT-2"], "'GPT-2'. Did you mean 'GPT-02'"),
        (["run", "oelm-freeze"], "unknown experiment 'oelm-freeze'"),
        (["run", "GPT-01", "--seed", "1", "seed=2"], "seed is set to 2 and is an axis"),
        (["run", "GPT-01", "output=x"], "choose the folder with --out"),
        (["run", "GPT-01", "train.max_step=3"], "Did you mean 'max_steps'?"),
        (["matrix", "GPT-01", "GPT-01"], "GPT-01: named twice"),
        (["run", "GPT-02", "--scale", "smoke", "--data", "here"], "--data here: smoke runs use built-in data"),
        (["matrix", "seed=1"], "name at least one experiment"),
        (["matrix", "GPT-01", "--lr-grid", "1e-3", "optimizer.learning_rate=1e-3"], "give one of the two"),
        (["matrix", "GPT-01", "--lr-grid", "1e-3", "--axis", "optimizer.learning_rate=1e-3"], "give one of them"),
        (["matrix", "GPT-01", "--lr-grid", "1e-3,0.001"], "lists 0.001 more than once"),
        (["matrix", "GPT-01", "--lr-grid", "-1"], "greater than 0"),
        (["matrix", "GPT-01", "--axis", "data.fraction"], "write it as field=value,value"),
        (["matrix", "GPT-01", "--axis", "data.fraction="], "write it as field=value,value"),
        (["matrix", "GPT-01", "--slurm", "account"], "--slurm account: write it as key=value"),
        (["matrix", "GPT-01", "--axis", "seed=1,2", "--seeds", "2"], "both choose the seeds"),
        (["matrix", "GPT-01", "--axis", "a.b=1", "--axis", "a.b=2"], "given twice"),
        (["matrix", "GPT-01", "--axis", "experiment=a,b"], "experiment=a,b: the lab names the runs"),
        (["matrix", "GPT-01", "--scale", "smoke", "--gpus", "7"], "torch sees no GPU"),
    ],
)
def test_contradictory_requests_are_refused(arguments, text, tmp_path):
    assert text in refusal(*arguments, *(["--out", tmp_path] if "output=x" not in arguments else []))
    assert list(tmp_path.iterdir()) == [], "nothing was written"


def test_different_runs_with_the_same_folder_are_refused(tmp_path):
    first, second = tmp_path / "mine.yaml", tmp_path / "other.yaml"
    first.write_text(yaml.safe_dump({"extends": "GPT-02", "axes": {"optimizer.learning_rate": [1e-3]}}))
    rest = {"id": "mine-lr-1e-3", "extends": "GPT-02"}
    second.write_text(yaml.safe_dump({**rest, "config": {"optimizer": {"learning_rate": 5e-4}}}))
    message = refusal("matrix", first, second, "--dry-run")
    assert "mine and mine-lr-1e-3: " in message
    assert "mine-lr-1e-3/oelm-freeze/seed-0" in message
    second.write_text(yaml.safe_dump({**rest, "config": {"optimizer": {"learning_rate": 1e-3}}}))
    assert "1 run," in lab("matrix", first, second, "--dry-run").stdout


def test_a_file_with_an_equals_sign_in_its_path_is_not_an_override(tmp_path):
    folder = tmp_path / "rate=3"
    folder.mkdir()
    file = experiment_file(folder)
    assert "1 run," in lab("matrix", file, "seed=4", "--dry-run").stdout


# Missing data and models


def test_missing_tokens_are_named_before_anything_is_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refusal("run", "GPT-02")
    assert "GPT-02 needs TinyStories" in message
    assert "oelm data prepare tinystories --tokenizer gpt2 --out data/tinystories" in message
    assert "--data DIR" in message
    assert "--scale smoke" in message
    assert list(tmp_path.iterdir()) == []
    Path("mine").mkdir()
    assert "in mine, which `oelm data prepare`" in refusal("run", "GPT-02", "--data", "mine")


def test_each_missing_data_set_is_named_once(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refusal("matrix", "ABC-tinystories", "GPT-04", "--seeds", "3")
    assert message.count("ABC-tinystories needs TinyStories") == 1
    assert message.count("GPT-04 needs OpenWebText") == 1


def test_data_and_models_are_named_if_the_hub_cannot_be_reached(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "available_from_hub", lambda *_: False)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: object())
    message = refusal("run", "SST-2-02")
    assert "SST-2, 67,349 sentences, from the Hub as nyu-mll/glue" in message
    assert "the pretrained model bert-base-uncased" in message
    assert "the tokenizer gpt2" in refusal("run", "GPT-IMDB", "--data", tmp_path)
    assert "there is no such folder" in refusal("run", "SST-2-02", "--data", tmp_path / "none")
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None)
    assert "pip install 'oelm[data]'" in refusal("run", "SST-2-02")


@pytest.mark.parametrize("field", ["model.name", "model.tokenizer"])
def test_a_missing_folder_is_named_even_if_the_hub_can_be_reached(field, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "available_from_hub", lambda *_: True)
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: object())
    for name in ("./nowhere", "some/where/else"):
        message = refusal("run", "SST-2-02", f"{field}={name}")
        assert f"the {field.removeprefix('model.').replace('name', 'model')} {name}: there is no such folder" in message


def test_errors_of_the_lab_are_oelm_errors():
    assert issubclass(LabError, OelmError)
    with pytest.raises(OelmError):
        find_experiment("nothing-like-it")


def test_the_users_data_replaces_the_named_data(tmp_path):
    from tests.support.training import token_folder

    (run,) = plan_runs([find_experiment("GPT-02")], Request(data=str(token_folder())))
    assert missing(run) == []
    assert find_experiment(str(experiment_file(tmp_path))).id == "study"
