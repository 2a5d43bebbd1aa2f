"""Invalid input: one clear line before any training, exit code 2, and nothing on the disk is overwritten."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from typer.testing import CliRunner

from oelm.base.yaml_text import parse_yaml
from oelm.cli.app import app
from oelm.config import ModelConfig, RunConfig, TrainConfig
from oelm.errors import ConfigError, MethodError
from oelm.method.spec import PRESETS, Method
from oelm.models.run_model import build_language_model
from oelm.training.engine import train
from tests.support.training import LIMIT, config, oelm, tiny, token_folder, write_yaml


def test_train_takes_a_config_and_nothing_else():
    for no_config in ("run.yaml", {"experiment": "x"}):
        with pytest.raises(ConfigError, match=r"as RunConfig\.load makes it, not (str|dict)$"):
            train(no_config)


def test_a_method_that_does_not_exist_is_refused_with_its_file(tmp_path):
    file = write_yaml(tmp_path / "run.yaml", {**tiny(tmp_path / "runs"), "method": "oelm-freez"})
    with pytest.raises(MethodError, match=r"run\.yaml: unknown preset 'oelm-freez'\. Did you mean 'oelm-freeze'"):
        RunConfig.load(file)


@pytest.fixture
def error_of(tmp_path, monkeypatch):
    """Return a function that runs `oelm train`, requires that it is refused before any step, and returns the error."""
    from oelm.training.step import Stepper

    def fail(*_):
        raise AssertionError("a step was taken")

    monkeypatch.setattr(Stepper, "step", fail)

    def run(*overrides: str, **changes: object) -> str:
        fields = tiny(tmp_path / "runs", **changes)
        result = CliRunner().invoke(app, ["train", str(write_yaml(tmp_path / "run.yaml", fields)), *overrides])
        assert result.exit_code == 2, (result.output, result.exception)
        assert result.stdout == ""
        lines = result.stderr.splitlines()
        assert len(lines) == 1, result.stderr
        assert lines[0].startswith("oelm: ")
        assert not (tmp_path / "runs").exists(), "a refused run leaves nothing behind"
        return lines[0]

    return run


def test_an_error_is_one_line_without_traceback_or_folder(tmp_path):
    """In a process of its own, as a user sees it."""
    file = write_yaml(tmp_path / "run.yaml", tiny(tmp_path / "runs", train={"max_step": 10}))
    process = oelm("train", file)
    output, errors = process.communicate(timeout=LIMIT)
    assert process.returncode == 2
    assert output == ""
    assert errors.startswith(f"oelm: {file}: train.max_step: ")
    assert "'max_steps'" in errors
    assert len(errors.splitlines()) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.yaml"]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["optimiser.learning_rate=1"], "optimiser: unknown key. Did you mean 'optimizer'?"),
        (["optimizer.learning_rat=1"], "optimizer.learning_rat: unknown key. Did you mean 'learning_rate'?"),
        (["method.laers=last:1"], "laers: unknown key. Did you mean 'layers'?"),
        (["method=oelm-frezee"], "'oelm-frezee'. Did you mean 'oelm-freeze'?"),
        (["optimizer.learning_rate=0"], "optimizer.learning_rate: Input should be greater than 0 (got 0)"),
        (["optimizer.learning_rate=fast"], "optimizer.learning_rate"),
        (["train.max_steps=0"], "train.max_steps: Input should be greater than 0 (got 0)"),
        (["train.max_steps=1.5"], "train.max_steps"),
        (["train.max_steps=true"], "train.max_steps: should be a number (got True)"),
        (["optimizer.learning_rate=false"], "optimizer.learning_rate: should be a number (got False)"),
        (["optimizer.name=sgd"], "optimizer.name: Input should be 'adamw' or 'muon' (got 'sgd')"),
        (["optimizer.name=muon", "train.parallel=fsdp"], "optimizer.name 'muon' needs whole matrices"),
        (["optimizer.name=muon", "method=bitfit"], "optimizer.name 'muon': no matrix of a block is trained"),
        (["train.precision=float16"], "train.precision: Input should be 'auto', 'float32' or 'bfloat16'"),
        (["train.batch_size=16", "train.micro_batch_size=5"], "train.batch_size 16 is not a multiple of"),
        (["experiment=../escape"], "experiment"),
        (["train.max_steps"], "'train.max_steps': an override is key=value"),
        (["=3"], "an override is key=value"),
        (["eval.targets=[a]"], "eval.targets"),
        (["eval.targets=[5, -3]"], "eval.targets.1: Input should be greater than 0 (got -3)"),
        (["train=3"], "train: should be a section with settings in it (got 3)"),
        (["eval.every=0"], "eval.every: Input should be greater than 0 or 'epoch' (got 0)"),
        ([f"seed={10**30}"], "seed: Input should be less than"),
        (["seed=-1"], "seed: Input should be greater than or equal to 0 (got -1)"),
        (["data.seed=-1"], "data.seed: Input should be greater than or equal to 0 (got -1)"),
        ([f"train.batch_size={10**30}"], "train.batch_size: Input should be less than"),
    ],
)
def test_an_invalid_config_names_the_field_and_the_value(overrides, message, error_of):
    assert message in error_of(*overrides)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a: [", "not YAML or JSON"),
        ("- 1\n- 2", "a config is a mapping"),
        ("", "a config is a mapping"),
        ("!!python/object/apply:os.getcwd []", "not YAML or JSON"),
        ("seed: 2026-13-45", "not YAML or JSON (month must be in 1..12)"),
        ("a: " + "[" * 5000, "not YAML or JSON (nested too deeply)"),
        ("seed: 1\ntrain: {}\nseed: 2", "run.yaml: not YAML or JSON (line 3: the key 'seed' is on line 1"),
        ("train:\n  epochs: 1\n  epochs: 1", "line 3: the key 'epochs' is on line 2"),
        ('{"seed": 1, "seed": 2}', "line 1: the key 'seed' is on line 1"),
    ],
)
def test_a_file_that_is_not_a_config_is_refused(content, message, tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(content)
    result = CliRunner().invoke(app, ["train", str(file)])
    assert result.exit_code == 2
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    missing = CliRunner().invoke(app, ["train", str(tmp_path / "none.yaml")])
    assert missing.exit_code == 2
    assert "none.yaml: cannot be read (No such file or directory)" in missing.stderr


@pytest.mark.parametrize(
    "text",
    [
        "a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}",
        "a: &a {x: 1}\nb: &b {x: 2}\nc: {<<: [*a, *b], x: 3}\nd: {<<: *a, <<: *b}",
        # The inner merge is resolved before the outer one.
        "deep: {er: {a: &a {<<: {x: 1}, x: 2}}}\nb: {<<: *a, x: 3}\nc: *a",
        "=: 1\n1: one\n'1': also one",
        "same: [{x: 1}, {x: 2}]",
    ],
)
def test_keys_merged_by_yaml_are_not_repeated_keys(text):
    assert parse_yaml(text) == yaml.safe_load(text)


def test_a_repeated_key_is_refused_in_any_notation():
    for text in ("1: a\n0x1: b", "a: 1\n'a': 2", "x: [{b: {c: 1, c: 1}}]", "a: &a {x: 1}\nb: {<<: *a, x: 2, x: 3}"):
        with pytest.raises(ValueError, match=r"line \d: the key .* is on line \d already"):
            parse_yaml(text)


def test_settings_without_a_config_file_are_refused():
    result = CliRunner().invoke(app, ["train", "seed=4", "output=x"])
    assert result.exit_code == 2
    assert "oelm train run.yaml seed=4" in result.stderr, "the right order"


# Data


def copy_tokens(tmp_path: Path) -> Path:
    return Path(shutil.copytree(token_folder(), tmp_path / "tokens"))


def test_missing_data_is_refused(tmp_path, error_of):
    assert "nowhere: no such folder" in error_of(f"data.path={tmp_path / 'nowhere'}")
    assert "'storys'" in error_of("data.path=builtin:storys")
    assert "not a prepared data folder" in error_of(f"data.path={tmp_path}")


def test_a_missing_or_truncated_token_file_is_refused(tmp_path, error_of):
    tokens = copy_tokens(tmp_path)
    content = (tokens / "train.bin").read_bytes()
    (tokens / "train.bin").write_bytes(content[:-1000])
    assert "train.bin: truncated" in error_of(f"data.path={tokens}")
    (tokens / "train.bin").unlink()
    assert "train.bin: missing" in error_of(f"data.path={tokens}")


def test_tokens_that_do_not_match_their_hash_are_refused(tmp_path, error_of):
    """Records identify the data by these hashes."""
    tokens = copy_tokens(tmp_path)
    content = bytearray((tokens / "val.bin").read_bytes())
    content[:2], content[2:4] = content[2:4], content[:2]
    (tokens / "val.bin").write_bytes(content)
    assert "the tokens have sha256" in error_of(f"data.path={tokens}")


def test_a_missing_or_wrong_tokenizer_is_refused(tmp_path, error_of):
    tokens = copy_tokens(tmp_path)
    file = tokens / "tokenizer/tokenizer.json"
    content = json.loads(file.read_text())
    content["model"]["merges"].pop()
    file.write_text(json.dumps(content))
    assert "the tokens were made with" in error_of(f"data.path={tokens}")
    shutil.rmtree(file.parent)
    assert f"{file.parent}: no tokenizer.json" in error_of(f"data.path={tokens}")


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("model.fields.num_hidden_layers=100000000", "of memory; use a smaller model"),
        ("model.fields.hidden_size=100000000", "of memory; use a smaller model"),
        ("model.fields.vocab_size=100000000000", "of memory; use a smaller model"),
        ("model.fields.eos_token_id=abc", "eos_token_id 'abc': must be the number of a token"),
        ("model.fields.eos_token_id=[1, 100000]", "eos_token_id 100000: the vocabulary has tokens 0 to "),
        ("model.fields.pad_token_id=-3", "pad_token_id -3: the vocabulary has tokens 0 to "),
        ("model.fields.layer_norm_eps=.inf", "layer_norm_eps inf: must be finite"),
        ("model.fields.dtype=float16", "train.precision"),
        ("model.fields.torch_dtype=bfloat16", "train.precision"),
        ("data.path=~/no-such-folder-of-tokens", f"{Path.home()}/no-such-folder-of-tokens: no such folder"),
    ],
)
def test_values_that_no_run_can_have_are_refused(override, problem, error_of):
    assert problem in error_of(override)


@pytest.mark.parametrize(
    ("family", "fields", "problem"),
    [
        ("gpt2", {"n_positions": 10**12}, "of memory; use a smaller model"),
        ("gpt2", {"n_inner": 10**12}, "of memory; use a smaller model"),
        ("gpt2", {"hidden_size": 0}, "no model can be made of its fields (ZeroDivisionError"),
        ("llama", {"rms_norm_eps": "abc"}, "expected float, got str"),
        ("llama", {"pad_token_id": 10**7}, "Padding_idx must be within num_embeddings"),
    ],
)
def test_fields_that_transformers_does_not_check_are_refused(family, fields, problem):
    with pytest.raises(ConfigError, match=re.escape(problem)):
        build_language_model(ModelConfig(name=f"random:{family}", fields=fields), vocab_size=64, length=8, seed=0)


def test_data_without_validation_split_is_refused(tmp_path, error_of):
    tokens = copy_tokens(tmp_path)
    header = json.loads((tokens / "data.json").read_text())
    del header["splits"]["val"], header["sha256"]
    (tokens / "data.json").write_text(json.dumps(header))
    assert "no validation tokens" in error_of(f"data.path={tokens}")


def test_a_corpus_shorter_than_one_window_is_refused(error_of):
    message = error_of("data.sequence_length=100000")
    assert "100,001 tokens" in message
    assert "0.0001" in error_of("data.fraction=0.0001")


def test_a_sequence_longer_than_the_positions_is_refused(error_of):
    message = error_of("model.fields.max_position_embeddings=16")
    assert "data.sequence_length 32" in message
    assert "16 positions" in message


def test_a_vocabulary_larger_than_the_models_is_refused(error_of):
    message = error_of("model.fields.vocab_size=399")
    assert "399" in message
    assert "400" in message
    assert "another tokenizer" in message


# The model and the method


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.name=gpt:tinny"], "no GPT size 'tinny'. Did you mean 'tiny'?"),
        (["model.fields.n_head=2"], "unknown field 'n_head'"),
        (["model.fields.hidden_sise=2"], "unknown field 'hidden_sise'. Did you mean 'hidden_size'?"),
        (["model.fields.num_attention_heads=5"], "hidden_size 32 is not a multiple of 5 heads"),
        (["model.fields.num_attention_heads=0"], "num_attention_heads"),
        (["model.fields.hidden_size=wide"], "hidden_size"),
        (["model.fields.hidden_size=-32"], "hidden_size"),
        (["model.fields.num_hidden_layers=0"], "num_hidden_layers"),
        (["model.fields.intermediate_size=0"], "intermediate_size"),
        (["model.fields.dropout=1.5"], "dropout"),
        (["model.fields.positions=relative"], "positions 'relative': use 'learned' or 'rotary' or 'none'"),
        (["model.name=random:bert", "model.fields={}"], "model.name random:bert: BertForSequenceClassification"),
        (["model.name=random:whisper", "model.fields={}"], "WhisperForConditionalGeneration is an encoder-decoder"),
        (["model.name=random:gpt2"], "model.fields: gpt2 has no field 'dropout'"),
        (["model.name=/nowhere/model", "model.fields={}"], "/nowhere/model: no such folder"),
        (["method={preset: oelm-freeze, layers: [5]}"], "layers [5] are out of range: the model has layers 0 to 1"),
        (
            ["method={preset: oelm-freeze, schedule: {kind: unfreeze, steps: [12]}}"],
            "method.schedule: step 12 is past the run's 12 steps",
        ),
        (
            ["method={preset: oelm-freeze, schedule: {kind: unfreeze, shares: [0.05, 0.1]}}"],
            "schedule.shares [0.05, 0.1] of a run of 12 steps are its steps [1, 1]",
        ),
        (
            ["method={preset: oelm-freeze, schedule: {kind: unfreeze, steps: [2, 3, 4]}}"],
            "3 steps of 1 layers, but only 2 layers are frozen",
        ),
    ],
)
def test_an_invalid_model_or_method_is_refused(overrides, message, error_of, tmp_path):
    if "model.fields={}" in overrides:  # an override adds to the fields, so a config without them is written
        fields = tiny(tmp_path / "runs")
        fields["model"] = {"name": overrides[0].partition("=")[2]}
        result = CliRunner().invoke(app, ["train", str(write_yaml(tmp_path / "run.yaml", fields))])
        assert (result.exit_code, len(result.stderr.splitlines())) == (2, 1)
        assert message in result.stderr
    else:
        assert message in error_of(*overrides)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_missing_device_is_refused(tmp_path, error_of):
    message = error_of("train.device=cuda")
    assert all(part in message for part in ("train.device", "'cuda'", "'auto'", "'cpu'"))
    assert not (tmp_path / "runs").exists()


# The study's names


@pytest.mark.parametrize(
    ("names", "preset"),
    [
        ({"model_type": "gpt"}, "baseline"),
        ({"model_type": "oelm"}, "oelm-freeze"),
        ({"model_type": "oelm", "freeze_qk": True}, "oelm-freeze"),
        ({"freeze_qk": True, "ortho_method": "global"}, "oelm-global"),
        ({"model_type": "oelm", "ortho_method": "normal"}, "oelm-random"),
        ({"model_type": "oelm", "freeze_qk": False}, "oelm-nofreeze"),
        ({"model_type": "oelm", "method": "oelm-freeze"}, "oelm-freeze"),
        ({"freeze_ratio": 0.075}, "oelm-freeze"),
        ({"model_type": "oelm", "freeze_qk": True, "ortho_method": "normal", "freeze_ratio": 0.075}, "oelm-random"),
    ],
)
def test_the_names_of_the_study_mean_presets(names, preset):
    assert RunConfig.load(names).method == PRESETS[preset]


def test_a_freeze_ratio_of_the_study_takes_in_feed_forward_matrices():
    share = Method.load({"preset": "oelm-qk-ffn", "freeze_ratio": 0.25})
    assert RunConfig.load({"model_type": "oelm", "freeze_ratio": 0.25}).method == share
    gaussian = {"init": "gaussian", "std": 0.02, "frozen": True}
    share = Method.load({"preset": "oelm-random", "ffn": gaussian, "freeze_ratio": 0.5})
    assert RunConfig.load({"ortho_method": "normal", "freeze_ratio": 0.5}).method == share


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"model_type": "gpt", "freeze_qk": True}, "not allowed with freeze_qk, ortho_method or freeze_ratio"),
        ({"model_type": "gpt", "freeze_ratio": 0.075}, "not allowed with freeze_qk, ortho_method or freeze_ratio"),
        ({"freeze_ratio": 25}, "freeze_ratio 25: use 0.075 for Q and K alone, or a share below 1"),
        ({"freeze_ratio": True}, "freeze_ratio True: use 0.075"),
        ({"freeze_qk": False, "freeze_ratio": 0.25}, "not allowed with freeze_qk: false"),
        ({"freeze_ratio": 0.075, "method": "baseline"}, "means method 'oelm-freeze', but method is 'baseline'"),
        ({"model_type": "bert"}, "model_type 'bert': use 'gpt' or 'oelm'"),
        ({"ortho_method": "polar"}, "ortho_method 'polar': use one of qr"),
        ({"ortho_method": ["qr"]}, "ortho_method ['qr']: use one of qr"),
        ({"freeze_qk": 0}, "freeze_qk 0: use true or false"),
        ({"freeze_qk": "false"}, "freeze_qk 'false': use true or false"),
        (
            {"model_type": "oelm", "freeze_qk": True, "method": "baseline"},
            "model_type: oelm, freeze_qk: True means method 'oelm-freeze', but method is 'baseline'",
        ),
    ],
)
def test_invalid_or_contradicting_names_of_the_study_are_refused(names, message):
    with pytest.raises(ConfigError) as error:
        RunConfig.load(names)
    assert message in str(error.value)


# Configs


def test_an_override_changes_a_section_that_is_given_by_a_name_or_an_object():
    task = RunConfig.load({"task": "sst2"}, ["task.revision=v1"]).task
    assert (task.name, task.revision, task.kind) == ("sst2", "v1", "classification")
    frozen = Method.load({"preset": "oelm-freeze", "layers": "last:1"})
    assert RunConfig.load({"method": "oelm-freeze"}, ["method.layers=last:1"]).method == frozen
    assert RunConfig.load({"method": PRESETS["oelm-freeze"]}, ["method.layers=last:1"]).method == frozen
    train = RunConfig.load({"train": TrainConfig(max_steps=7)}, ["train.batch_size=4"]).train
    assert (train.max_steps, train.batch_size) == (7, 4)


@pytest.mark.parametrize(
    ("fields", "override", "message"),
    [
        ({"model": "random:bert"}, "model.revision=v1", "model.revision: model is 'random:bert', which has no fields"),
        ({"seed": 3}, "seed.data=1", "seed.data: seed is 3, which has no fields to set"),
        ({}, "task.text=review", "task: text, pair and label name columns"),
    ],
)
def test_an_invalid_override_is_reported_with_its_field(fields, override, message):
    with pytest.raises(ConfigError) as error:
        RunConfig.load(fields, [override])
    assert message in str(error.value)


def test_the_error_of_an_override_names_the_override(tmp_path):
    file = write_yaml(tmp_path / "run.yaml", tiny(tmp_path / "runs"))
    with pytest.raises(ConfigError) as error:
        RunConfig.load(file, ["seed=1", "out=runs"])
    assert str(error.value).startswith(f"{file} with seed=1 out=runs: out: ")
    assert "'output'" in str(error.value)


def test_the_id_depends_on_the_settings_that_change_numbers(tmp_path):
    base = config(tmp_path)
    same = [
        config(tmp_path / "elsewhere"),
        config(tmp_path, log={"every": 99, "note": "x", "trackers": ["wandb"]}),
        config(tmp_path, checkpoint={"every": 99, "keep": 3, "best": False, "resume": "never"}),
    ]
    assert {run.id for run in same} == {base.id}
    changes = [
        {"experiment": "other"},
        {"seed": 1},
        {"model": {"fields": {"dropout": 0.2}}},
        {"method": "oelm-freeze"},
        {"method": {"preset": "oelm-freeze", "layers": "last:1"}},
        {"data": {"sequence_length": 16}},
        {"data": {"seed": 3}},
        {"optimizer": {"learning_rate": 0.004}},
        {"train": {"max_steps": 13}},
        {"train": {"micro_batch_size": 4}},
        {"eval": {"sequences": 11}},
    ]
    ids = [config(tmp_path, **change).id for change in changes]
    assert len({base.id, *ids}) == len(changes) + 1
    assert RunConfig.load(json.loads(base.to_json())) == base
    assert RunConfig.load(json.loads(base.to_json())).to_json() == base.to_json()
    assert config(tmp_path, method=PRESETS["oelm-core"].model_dump()).id == config(tmp_path, method="oelm-core").id


def test_the_folder_of_a_run_names_its_method_and_seed(tmp_path):
    assert config(tmp_path, seed=3).folder == tmp_path / "run/baseline/seed-3"
    last_layer = config(tmp_path, method={"preset": "oelm-freeze", "layers": "last:1"}).folder
    first_layer = config(tmp_path, method={"preset": "oelm-freeze", "layers": "first:1"}).folder
    assert last_layer.parent.name.startswith("custom-")
    assert last_layer != first_layer


@pytest.mark.parametrize(
    ("override", "field", "value"),
    [
        ("optimizer.learning_rate=3e-4", ("optimizer", "learning_rate"), 3e-4),
        ("optimizer.learning_rate=1E-3", ("optimizer", "learning_rate"), 1e-3),
        ("optimizer.learning_rate=.002", ("optimizer", "learning_rate"), 0.002),
        ("train.max_steps=100", ("train", "max_steps"), 100),
        ("train.micro_batch_size=null", ("train", "micro_batch_size"), None),
        ("train.gradient_checkpointing=true", ("train", "gradient_checkpointing"), True),
        ("eval.targets=[10, 5.5]", ("eval", "targets"), (10.0, 5.5)),
        ("log.note=nan is not a number", ("log", "note"), "nan is not a number"),
        ("log.note=nan", ("log", "note"), "nan"),
        ("log.note=a=b", ("log", "note"), "a=b"),
        ("optimizer.multipliers.q=2", ("optimizer", "multipliers"), {"q": 2.0}),
        ("data.path=/some/where", ("data", "path"), "/some/where"),
    ],
)
def test_an_override_sets_a_field_to_the_parsed_value(override, field, value, tmp_path):
    run = RunConfig.load(tiny(tmp_path), [override])
    assert getattr(getattr(run, field[0]), field[1]) == value


def test_an_override_changes_one_field_and_keeps_the_rest(tmp_path):
    fields = tiny(tmp_path, method="oelm-freeze")
    run = RunConfig.load(fields, ["model.fields.dropout=0.5", "method.biases=trained", "method.layers=last:1"])
    assert run.model.fields == {**fields["model"]["fields"], "dropout": 0.5}
    assert run.method == PRESETS["oelm-freeze"].model_copy(update={"biases": "trained", "layers": "last:1"})
    assert RunConfig.load(fields, ["method=oelm-core"]).method == PRESETS["oelm-core"]
    assert fields["method"] == "oelm-freeze"


def test_a_yaml_file_may_use_scientific_notation(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("optimizer:\n  learning_rate: 3e-4\n  weight_decay: 1e-1\n")
    assert isinstance(yaml.safe_load(file.read_text())["optimizer"]["learning_rate"], str)
    assert RunConfig.load(file).optimizer.learning_rate == 3e-4
    assert RunConfig.load(file).optimizer.weight_decay == 0.1
