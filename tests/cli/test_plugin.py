"""A plugin: the user's own file, run by every command and by the processes that it starts, and by nothing else."""

import json
import os

import pytest
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, OlmoConfig, OlmoForCausalLM

import oelm
from oelm.base import plugin
from oelm.errors import ConfigError, FileError
from oelm.lab.launch.slurm import TrainJob
from oelm.method import families
from oelm.method.families import known_types
from oelm.models.load import build_model
from tests.support.lab import experiment_file, lab, refusal, start_command

FAMILY = """
import oelm

oelm.register_family(
    "olmo",
    block="layers.*",
    kind="decoder",
    q="self_attn.q_proj",
    k="self_attn.k_proj",
    v="self_attn.v_proj",
    o="self_attn.o_proj",
    kv_heads="num_key_value_heads",
    rotary=True,
)
"""

OWN_CLASS = """
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import oelm


class OwnConfig(LlamaConfig):
    model_type = "own-llama"


class OwnForCausalLM(LlamaForCausalLM):
    config_class = OwnConfig


AutoConfig.register("own-llama", OwnConfig)
AutoModelForCausalLM.register(OwnConfig, OwnForCausalLM)
oelm.register_family("own-llama", family="llama")
"""

BARE_CLASS = """
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, LlamaModel, LlamaPreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import oelm


class BareConfig(LlamaConfig):
    model_type = "bare-llama"


class BareForCausalLM(LlamaPreTrainedModel):
    config_class = BareConfig

    def __init__(self, config):
        super().__init__(config)
        self.model = LlamaModel(config)
        self.words = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, **options):
        return CausalLMOutput(logits=self.words(self.model(input_ids, use_cache=False).last_hidden_state))

    def get_output_embeddings(self):
        return self.words


AutoConfig.register("bare-llama", BareConfig)
AutoModelForCausalLM.register(BareConfig, BareForCausalLM)
oelm.register_family("bare-llama", family="llama")
"""


@pytest.fixture
def fresh(monkeypatch):
    """Return a function that makes this process one that has run no plugin, as it is again after the test."""
    known = dict(families._FAMILIES)

    def forget():
        monkeypatch.setattr(plugin, "_loaded", [])
        monkeypatch.setattr(families, "_FAMILIES", dict(known))
        monkeypatch.setenv(plugin.VARIABLE, "")
        monkeypatch.delenv(plugin.VARIABLE)

    forget()
    return forget


@pytest.fixture
def file(tmp_path):
    """Return a plugin that registers the type 'olmo'."""
    file = tmp_path / "olmo_family.py"
    file.write_text(FAMILY)
    return file


def olmo_experiment(folder):
    """Write a model of the type 'olmo', and an experiment of one run with it."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    OlmoForCausalLM(OlmoConfig(**sizes, vocab_size=400, eos_token_id=2)).save_pretrained(folder / "olmo")
    file = experiment_file(folder, axes={"method": ["oelm-freeze"]}, stand_in="olmo")
    content = yaml.safe_load(file.read_text())
    content["config"]["model"] = {"name": str(folder / "olmo")}
    file.write_text(yaml.safe_dump(content))
    return file


@pytest.mark.full
def test_a_family_of_ones_own_reaches_the_runs_of_a_matrix_and_what_uses_them(file, fresh, tmp_path, monkeypatch):
    """The matrix starts `oelm train` in a process of its own; the run's record says what code it was made with."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as in this process, or the run could not be resumed here
    experiment, out = olmo_experiment(tmp_path), tmp_path / "runs"
    matrix = start_command("--plugin", file, "matrix", experiment, "--out", out, "--gpus", "")
    assert matrix.wait(150) == 0, matrix.stdout.read()
    run = out / "study" / "oelm-freeze" / "seed-0"
    recorded = json.loads((run / "environment.json").read_text())["plugin"]
    assert recorded == {"name": "olmo_family.py", "sha256": plugin.load_plugin(file).sha256}
    assert str(tmp_path) not in json.dumps(recorded), "a record that is shared names no folder of this machine"

    fresh()
    without = refusal("export", run, tmp_path / "plain")
    assert "was made with the plugin olmo_family.py" in without
    assert "oelm --plugin olmo_family.py" in without
    assert "olmo" not in known_types(), "what a folder names must not be run"
    assert lab("--plugin", file, "export", run, tmp_path / "plain").exit_code == 0
    assert OlmoForCausalLM.from_pretrained(tmp_path / "plain").config.model_type == "olmo"

    # An interrupted run resumes with the same plugin alone.
    (run / "result.json").unlink()
    fresh()
    assert "was made with the plugin" in refusal("train", run / "planned.json")
    file.write_text(FAMILY + "# changed\n")
    changed = lab("--plugin", file, "train", run / "planned.json")
    assert changed.exit_code == 2
    assert "cannot resume exactly: plugin olmo_family.py (" in changed.stderr
    file.write_text(FAMILY)
    fresh()
    monkeypatch.setenv(plugin.VARIABLE, str(file))
    assert lab("train", run / "planned.json", "--quiet").exit_code == 0


def test_the_path_is_handed_on_to_processes_that_are_started(file, fresh, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert plugin.load_plugin(file.name).path == file
    assert os.environ[plugin.VARIABLE] == str(file)
    assert "olmo" in known_types()
    plugin.load_plugin(file)  # a second time changes nothing
    (tmp_path / "other.py").write_text("")
    with pytest.raises(FileError, match=r"olmo_family\.py \(.* is loaded already"):
        plugin.load_plugin("other.py")


def test_a_class_that_a_plugin_registers_is_loaded(fresh, tmp_path):
    """With and without a method: transformers does not have the class that the folder's config names."""
    (tmp_path / "own.py").write_text(OWN_CLASS)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    LlamaForCausalLM(LlamaConfig(**sizes, vocab_size=99, eos_token_id=2)).save_pretrained(tmp_path / "own")
    config = tmp_path / "own" / "config.json"
    own = {"model_type": "own-llama", "architectures": ["OwnForCausalLM"]}
    config.write_text(json.dumps({**json.loads(config.read_text()), **own}))
    done = lab("--plugin", tmp_path / "own.py", "diagnose", tmp_path / "own", "--method", "oelm-freeze")
    assert done.exit_code == 0, done.output
    model = build_model(str(tmp_path / "own"))
    assert type(model).__name__ == "OwnForCausalLM"
    oelm.apply(model, "oelm-freeze")
    model.save_pretrained(tmp_path / "applied")
    assert type(oelm.load(tmp_path / "applied")) is type(model)
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["OtherForCausalLM"]}))
    assert "oelm --plugin FILE" in refusal("diagnose", tmp_path / "own", "--method", "oelm-freeze")


def test_a_class_that_cannot_generate_is_trained(fresh, tmp_path):
    """It has no generation_config, and the trainer needs nothing else of transformers' GenerationMixin."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    folder, file = tmp_path / "bare", tmp_path / "bare.py"
    LlamaConfig(**sizes, vocab_size=1000).save_pretrained(folder)
    config = folder / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "model_type": "bare-llama"}))
    assert "oelm --plugin FILE" in refusal("export", folder, tmp_path / "plain"), "no class is registered yet"
    small = ("model.from_scratch=true", "train.max_steps=2", "data.sequence_length=16")
    command = ("train", "--model", folder, "--out", tmp_path / "runs", "method=oelm-freeze", *small)
    file.write_text(BARE_CLASS)
    done = lab("--plugin", file, *command)
    assert done.exit_code == 0, done.output
    (run,) = (tmp_path / "runs").glob("*/oelm-freeze/seed-0")
    assert "has no `generate`" in refusal("--plugin", file, "generate", run)


def test_a_job_of_a_scheduler_runs_the_plugin_first(file, fresh, tmp_path):
    """It does not go through the command line."""
    with pytest.raises(ConfigError, match=r"nowhere\.json"):
        TrainJob(str(tmp_path / "nowhere.json"), plugin=str(file))()
    assert "olmo" in known_types()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("none.py", None, "none.py: cannot be read (No such file or directory)"),
        ("run.yaml", "method: baseline", "run.yaml: a plugin is a Python file, whose name ends in .py"),
        ("half.py", "import oelm\noelm.register_family(", "half.py: line 2 is not Python ('(' was never closed)"),
        ("known.py", "import oelm\noelm.register_family('bert', family='gpt2')", "'bert' has a family already"),
        ("fails.py", "import oelm\nimport nowhere", 'fails.py", line 2, in <module>'),
    ],
)
def test_a_file_that_is_no_plugin_is_refused(name, content, message, fresh, tmp_path):
    if content is not None:
        (tmp_path / name).write_text(content)
    refused = refusal("--plugin", tmp_path / name, "families")
    assert message in refused
    assert plugin.__file__ not in refused, "a traceback begins with the user's own file"


@pytest.mark.parametrize("arguments", [("families", "--plugin", "a.py"), ("data", "prepare", "--plugin=a.py", "x")])
def test_a_plugin_behind_the_command_is_told_its_place(arguments, fresh):
    result = lab(*arguments)
    assert result.exit_code == 2, result.output
    message = " ".join(result.stderr.replace("│", " ").split())
    assert f"--plugin stands before the command: oelm --plugin FILE {arguments[0]} ..." in message


def test_a_config_cannot_name_a_plugin(file, fresh, tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(f"plugin: {file}\n")
    assert "plugin" in refusal("train", config)
    assert "olmo" not in known_types()
