"""The command line in real processes: exit codes, and what goes to stdout and stderr."""

import errno
import inspect
import json
import os
import re
import resource
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForSequenceClassification, MambaConfig, OlmoConfig
from typer.testing import CliRunner

import oelm
from oelm.cli import data as data_commands
from oelm.cli.app import app
from oelm.method.diagnose import diagnose, train_steps
from oelm.method.families import known_types
from oelm.method.spec import PRESETS
from oelm.models.small import small_model


def run(*arguments: object, largest_file: int = resource.RLIM_INFINITY) -> subprocess.CompletedProcess[str]:
    """Run `oelm ARGUMENTS` in its own process, without network and colours."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "TERM": "dumb", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "oelm", *map(str, arguments)]
    limit = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (largest_file, resource.RLIM_INFINITY))
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, preexec_fn=limit)


def invoke(*arguments: object):
    """Run `oelm ARGUMENTS` in this process, which has imported torch already."""
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def assert_refused(result, *texts: str) -> None:
    """Assert exit code 2, one line on stderr that contains the texts, and nothing on stdout."""
    assert (result.returncode if isinstance(result, subprocess.CompletedProcess) else result.exit_code) == 2
    assert result.stdout == ""
    lines = result.stderr.splitlines()
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("oelm: ")
    assert all(text in lines[0] for text in texts), lines[0]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return a folder with a saved plain model, and the same one saved after `oelm.apply`."""
    folder = tmp_path_factory.mktemp("models")
    model = small_model("bert")
    model.save_pretrained(folder / "plain")
    oelm.apply(model, "oelm-exact")
    model.save_pretrained(folder / "operated")
    return folder


def test_help_names_every_command():
    result = run("--help")
    assert result.returncode == 0
    assert all(command in result.stdout for command in ("diagnose", "methods", "families", "export"))
    assert run("diagnose", "--help").returncode == 0


def test_paragraphs_of_help_texts_have_no_line_breaks():
    for command in (*app.registered_commands, *data_commands.data_app.registered_commands):
        paragraphs = inspect.getdoc(command.callback).split("\n\n")
        assert not [text for text in paragraphs if "\n" in text], command.name


def test_version_option_prints_the_version():
    assert run("--version").stdout == f"oelm {oelm.__version__}\n"


def test_methods_lists_every_preset():
    result = run("methods")
    assert result.returncode == 0
    assert [line.split()[0] for line in result.stdout.splitlines()] == list(PRESETS)
    listed = json.loads(invoke("methods", "--json").stdout)
    assert {name: oelm.Method.load(fields) for name, fields in listed.items()} == dict(PRESETS)


@pytest.mark.parametrize("command", [(), ("data",), ("data", "prepare"), ("bench",), ("train",)])
def test_flags_are_shown_without_the_type_of_a_value(command):
    """A `<bool>` beside a flag reads as if it took one."""
    shown = invoke(*command, "--help").stdout
    assert "--help" in shown
    assert "bool" not in shown.lower()


@pytest.mark.parametrize("command", [("methods",), ("experiments",), ("bench", "--forms"), ("--help",)])
def test_lists_and_help_fit_a_terminal_and_keep_words_whole(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    narrow = invoke(*command).stdout
    assert max(map(len, narrow.splitlines())) <= 80
    monkeypatch.setenv("COLUMNS", "200")
    words = set(re.findall(r"[\w./-]+", invoke(*command).stdout))
    assert words <= set(re.findall(r"[\w./-]+", narrow))


def test_help_has_groups_and_every_command_has_examples():
    shown = invoke("--help").stdout
    panels = ["Apply a method", "Train a model and use it", "Run experiments", "Look at results"]
    assert sorted(map(shown.find, panels)) == list(map(shown.find, panels))
    assert "Commands" not in shown, "every command is in a group"
    for command in app.registered_commands:
        assert "Examples:" in command.epilog
        assert f"oelm {command.name}" in command.epilog


def test_families_lists_every_known_type():
    assert run("families").stdout.split() == known_types()


def test_families_suggests_how_to_register_a_model_by_its_config_alone(tmp_path, monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    OlmoConfig(**sizes, vocab_size=99, eos_token_id=2).save_pretrained(tmp_path)
    for model in (tmp_path, tmp_path / "config.json"):
        result = invoke("families", "--guess", model)
        assert result.exit_code == 0, result.stderr
        assert "2 attentions were found with it, and their heads came out orthogonal:" in result.stdout
        assert "oelm.register_family(\n    'olmo',\n    block='layers.*',\n" in result.stdout
        assert "oelm --plugin FILE" in result.stdout
    monkeypatch.setenv("COLUMNS", "80")
    narrow = invoke("families", "--guess", tmp_path).stdout
    assert max(map(len, narrow.splitlines())) <= 80
    assert narrow.split() == result.stdout.split()
    monkeypatch.delenv("COLUMNS")
    known = invoke("families", "--guess", "random:bert")
    assert known.stdout == "'bert' is a supported model type: there is nothing to register\n"
    MambaConfig(num_hidden_layers=2).save_pretrained(tmp_path / "mamba")
    assert_refused(invoke("families", "--guess", tmp_path / "mamba"), "no field such as num_attention_heads")
    OlmoConfig(**sizes | {"num_attention_heads": 0}).save_pretrained(tmp_path / "none")
    none = invoke("families", "--guess", tmp_path / "none")
    assert_refused(none, "transformers builds no model from its config (ZeroDivisionError")


def test_diagnose_prints_the_report_and_what_changed():
    result = run("diagnose", "random:bert", "-m", "oelm-freeze")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    assert "BertForSequenceClassification: oelm-freeze, seed 0" in result.stdout
    assert "12 of 12 frozen tensors are bit-identical to the sealed ones" in result.stdout
    assert result.stdout.endswith("no frozen tensor changed, every trainable one did\n")
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.full
def test_diagnose_takes_a_plain_folder_and_a_method_file(folders, tmp_path):
    file = tmp_path / "method.yaml"
    file.write_text("preset: oelm-freeze\nk: {scale: 4}\nlayers: last:1\n")
    result = invoke("diagnose", folders / "plain", "--method", file, "--seed", 7, "--steps", 2)
    assert result.exit_code == 0, result.stderr
    assert "custom, seed 7" in result.stdout
    assert "2 AdamW steps" in result.stdout
    assert "4 of 4 frozen tensors" in result.stdout


@pytest.mark.full
def test_a_method_can_be_written_out_on_the_command_line():
    done = invoke("diagnose", "random:bert", "-m", "{preset: oelm-freeze, layers: 'last:1'}")
    assert done.exit_code == 0, done.output
    assert "4 of 4 frozen tensors are bit-identical" in done.output
    for wrong, message in (("{preset: oelm-freeze", "not YAML or JSON"), ("{layer: all}", "layer: unknown key")):
        refused = invoke("diagnose", "random:bert", "-m", wrong)
        assert refused.exit_code == 2
        assert message in refused.output


def test_diagnose_uses_the_method_that_a_folder_has_already(folders):
    completed = invoke("diagnose", folders / "operated", "--json")
    assert completed.exit_code == 0, completed.stderr
    result = json.loads(completed.stdout)
    assert result["healthy"] is True
    assert result["report"]["method"] == "oelm-exact"
    assert len(result["losses"]) == 3
    assert result["report"]["frozen"] == 3 * (2 * 48 * 48 + 2 * 48)
    assert not any("weight" in name and ".query." in name for name in result["moved"])


def test_an_unknown_preset_is_refused_in_one_line():
    assert_refused(run("diagnose", "random:bert", "-m", "oelm-frezee"), "'oelm-frezee'", "'oelm-freeze'")


@pytest.mark.full
def test_an_unknown_model_is_refused_in_one_line():
    assert_refused(invoke("diagnose", "random:brt"), "'brt'", "'bert'")


@pytest.mark.full
def test_a_missing_folder_is_refused_in_one_line(tmp_path):
    assert_refused(invoke("diagnose", tmp_path / "nowhere"), "nowhere: no such folder")


@pytest.mark.full
def test_export_of_a_missing_source_is_refused():
    assert_refused(run("export", "nowhere", "out"), "oelm: nowhere: no such folder", "Hub")


@pytest.mark.full
def test_export_writes_a_plain_checkpoint(folders, tmp_path):
    result = run("export", folders / "operated", tmp_path / "out")
    assert result.returncode == 0, result.stderr
    assert result.stdout == f"wrote {tmp_path / 'out'}\n"
    plain = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, oelm.load(folders / "operated").eval()(ids).logits)


def test_export_refuses_a_folder_that_is_not_empty(folders, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert_refused(invoke("export", folders / "operated", tmp_path), str(tmp_path), "not empty", "nothing was written")
    assert [file.name for file in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.full
def test_an_export_without_disk_space_is_refused_and_leaves_no_files(folders, tmp_path):
    """A limit on the size of files stands in for a full disk."""
    (tmp_path / "there").mkdir()
    for name in ("there", "new"):
        out = tmp_path / name
        result = run("export", folders / "operated", out, largest_file=4000)
        assert_refused(result, f"{out}: cannot be written", "File too large")
    assert [path.name for path in tmp_path.rglob("*")] == ["there"]


@pytest.fixture
def sabotage(monkeypatch):
    """Make training change a frozen tensor too, as masked gradients with weight decay would."""

    def steps(model, *arguments):
        losses = train_steps(model, *arguments)
        with torch.no_grad():
            model.bert.encoder.layer[1].attention.self.query.weight.mul_(0.999)
        return losses

    monkeypatch.setattr("oelm.method.diagnose.train_steps", steps)


@pytest.mark.usefixtures("sabotage")
def test_a_changed_frozen_tensor_is_reported_with_exit_code_1():
    result = diagnose(small_model("bert"), "oelm-freeze")
    assert not result.healthy
    assert result.frozen_but_moved == ("bert.encoder.layer.1.attention.self.query.weight",)
    assert "its content changed" in result.verification
    completed = invoke("diagnose", "random:bert", "-m", "oelm-freeze")
    assert completed.exit_code == 1
    assert "FROZEN BUT MOVED: bert.encoder.layer.1.attention.self.query.weight" in completed.output
    assert completed.output.endswith("a frozen tensor changed, or a trainable one did not\n")


def test_an_unchanged_trainable_tensor_is_reported():
    model = small_model("bert")
    model.unused = nn.Parameter(torch.ones(3))
    result = diagnose(model, "oelm-freeze")
    assert not result.healthy
    assert result.trainable_but_still == ("unused",)


def test_a_frozen_tensor_made_trainable_is_reported():
    model = small_model("bert")
    oelm.apply(model, "oelm-freeze")
    model.bert.encoder.layer[0].attention.self.key.weight.requires_grad_(True)
    result = diagnose(model)
    assert not result.healthy
    assert "key.weight was frozen and is now trainable" in result.verification


def test_diagnose_of_a_model_without_a_method_is_healthy_with_nothing_frozen():
    result = diagnose(small_model("gpt2"))
    assert result.healthy
    assert result.verification == "no method is recorded in this model"
    assert result.report.frozen == 0


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["random:bert", "-m", "missing.yaml"], "missing.yaml: no such file"),
        (["random:gemma", "-m", "identity-query"], "4 x 16 is not 48"),
        (["."], "no config.json there"),
    ],
)
def test_diagnose_refuses_bad_arguments(arguments, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("diagnose", *arguments)
    assert result.exit_code == 2
    assert result.stderr.startswith("oelm: ")
    assert text in result.stderr


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("q: [", "not YAML or JSON"),
        ("", "not NoneType"),
        ("[1, 2]", "not list"),
        ("layer: all", "layer: unknown key. Did you mean 'layers'?"),
        ("preset: oelm-freeze\nk: {scale: 0}", "k.scale"),
        ("!!python/object/apply:os.getcwd []", "not YAML or JSON"),
        ("layers: 2026-13-45", "not YAML or JSON (month must be in 1..12)"),
    ],
)
def test_a_bad_method_file_is_refused_in_one_line(content, text, tmp_path):
    file = tmp_path / "method.yml"
    file.write_text(content)
    for command in (["diagnose", "random:bert"], ["finetune", "builtin:sentiment", "--model", "random:bert"]):
        result = invoke(*command, "-m", file)
        assert result.exit_code == 2
        assert text in result.stderr
        assert len(result.stderr.splitlines()) == 1


def test_a_folder_with_truncated_weights_is_refused_in_one_line(folders, tmp_path):
    for name in ("plain", "operated"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_bytes((folders / name / "config.json").read_bytes())
        weights = (folders / name / "model.safetensors").read_bytes()
        (folder / "model.safetensors").write_bytes(weights[: len(weights) // 2])
        result = invoke("diagnose", folder)
        assert result.exit_code == 2, result.output
        assert name in result.stderr
        assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (PermissionError(errno.EACCES, "Permission denied", "runs/x"), "oelm: runs/x: Permission denied"),
        (OSError(errno.ENOSPC, "No space left on device", "runs/x"), "oelm: runs/x: No space left on device"),
        (MemoryError("Unable to allocate 7 TiB"), "oelm: not enough memory: use a smaller model, batch or"),
        (RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate"), "oelm: not enough memory: use a smaller"),
        (torch.OutOfMemoryError("CUDA out of memory."), "oelm: not enough memory: use a smaller model, batch or"),
    ],
)
def test_full_disks_and_lack_of_memory_are_reported_in_one_line(error, text, monkeypatch):
    def refuse(*_):
        raise error

    monkeypatch.setattr("oelm.evaluation.load.find_model", refuse)
    result = invoke("diagnose", "random:bert")
    assert result.exit_code == 2
    assert result.stderr.startswith(text)
    assert len(result.stderr.splitlines()) == 1


@pytest.mark.parametrize("error", [RuntimeError("a bug"), FileNotFoundError(errno.ENOENT, "gone", "x"), OSError()])
def test_an_unexpected_exception_is_not_caught(error, monkeypatch):
    def fail(*_):
        raise error

    monkeypatch.setattr("oelm.evaluation.load.find_model", fail)
    assert invoke("diagnose", "random:bert").exception is error


def test_usage_errors_exit_with_2():
    assert invoke("diagnose").exit_code == 2
    assert invoke("diagnose", "random:bert", "--steps", "0").exit_code == 2
    assert invoke("dignose").exit_code == 2


FULL = Path("/dev/full")


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.parametrize("command", [["methods"], ["--help"], ["experiments"]])
def test_output_to_a_full_disk_is_refused_in_one_line(command):
    with FULL.open("w") as full:
        done = subprocess.run([sys.executable, "-m", "oelm", *command], stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr.strip()) == (
        2,
        "oelm: the output cannot be written (No space left on device)",
    )


@pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
@pytest.mark.full
def test_progress_to_a_full_disk_does_not_end_a_run(tmp_path):
    settings = ["train.max_steps=2", "log.every=1", "model.fields.hidden_size=16", "model.fields.num_hidden_layers=1"]
    quick = ["eval.sequences=2", "model.fields.num_attention_heads=2", f"output={tmp_path}"]
    command = [sys.executable, "-m", "oelm", "train", "--data", "builtin:stories", *settings, *quick]
    with FULL.open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=full, cwd=tmp_path)
    assert done.returncode == 0
    assert len(list(tmp_path.rglob("result.json"))) == 1
    (log,) = tmp_path.rglob("train.log")
    assert "step 2/2" in log.read_text()
