"""Hugging Face's Trainer on a model with a method: the usual script needs `oelm.apply` and no more, resume included."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import Trainer, TrainingArguments

import oelm
from oelm.method.diagnose import sample_batch
from tests.support.distributed import free_port
from tests.support.models import assert_same_model, hashes, lively_model, model_with_method

# The usual script, without a seed for torch: every start builds other first weights.
_SCRIPT = """
import os, signal, sys
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
import oelm

folder, resume = sys.argv[1], len(sys.argv) > 2
torch.set_num_threads(1)

class KillAfterSave(TrainerCallback):
    def on_save(self, *arguments, **more):
        if not resume:
            os.kill(os.getpid(), signal.SIGKILL)

model = GPT2LMHeadModel(GPT2Config(vocab_size=99, n_embd=48, n_layer=2, n_head=4, n_positions=32))
oelm.apply(model, "oelm-freeze", seed=0)
ids = torch.arange(8)
rows = [{"input_ids": ids + i, "labels": ids + i} for i in range(8)]
arguments = TrainingArguments(
    folder, max_steps=4, save_steps=2, per_device_train_batch_size=2, weight_decay=0.1, learning_rate=1e-3,
    report_to=[], use_cpu=True, disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=rows, callbacks=[KillAfterSave()])
trainer.train(resume_from_checkpoint=resume)
assert trainer.state.global_step == 4
trainer.save_model(folder + "/final")
"""


@pytest.mark.full
def test_the_usual_script_is_killed_and_resumed(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_SCRIPT)
    for more, expected in (([], -signal.SIGKILL), (["resume"], 0)):
        command = [sys.executable, str(script), str(tmp_path / "out"), *more]
        result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
        assert result.returncode == expected, result.stderr
    first, last = (oelm.load(tmp_path / "out" / name) for name in ("checkpoint-2", "final"))
    verification = oelm.verify(last)
    assert verification.exact == verification.tensors > 0
    assert hashes(last, frozen=True) == hashes(first, frozen=True)
    after = hashes(last, frozen=False)
    assert [name for name, digest in hashes(first, frozen=False).items() if after[name] == digest] == []


# Two processes of a script with random first weights; DistributedDataParallel hands out those of the first.
_DISTRIBUTED = """
import sys
import torch
from transformers import BertConfig, BertModel
import oelm

torch.distributed.init_process_group("gloo")
if len(sys.argv) > 1:
    torch.manual_seed(0)
model = BertModel(BertConfig(vocab_size=99, hidden_size=48, num_hidden_layers=2, num_attention_heads=4))
oelm.apply(model, "oelm-freeze")
torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
oelm.verify(model)
"""


@pytest.mark.full
@pytest.mark.parametrize("seeded", [False, True])
def test_processes_that_build_other_models_are_told_to_set_a_seed(seeded, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(_DISTRIBUTED)
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(script), *(["seed"] if seeded else [])]
    processes = [
        subprocess.Popen(command, env={**os.environ, **group, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    ends = [(process.communicate(timeout=120)[1], process.returncode) for process in processes]
    assert [code for _, code in ends] == [0, 0 if seeded else 1], ends
    assert ("torch.manual_seed(...) before the model is built" in ends[1][0]) is not seeded


def _train(model: Any, folder: str, resume: bool = False, **arguments: Any) -> Trainer:
    batch = sample_batch(model)
    rows = [{key: value[i] for key, value in batch.items()} for i in range(len(batch["labels"]))]
    always = {"max_steps": 3, "save_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-3}
    quiet = {"report_to": [], "use_cpu": True, "disable_tqdm": True, "logging_strategy": "no"}
    options = TrainingArguments(folder, weight_decay=0.1, **(always | quiet | arguments))
    trainer = Trainer(model, options, train_dataset=rows, eval_dataset=rows)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


@pytest.mark.parametrize(
    ("name", "preset"), [("bert", "oelm-freeze"), ("bert", "oelm-exact"), ("oelm-gpt", "identity-core")]
)
def test_hugging_faces_trainer_needs_only_apply(name, preset, tmp_path):
    model = model_with_method(name, preset)
    frozen, trained = hashes(model, frozen=True), hashes(model, frozen=False)
    trainer = _train(model, str(tmp_path))
    assert trainer.evaluate()["eval_loss"] > 0
    assert hashes(model, frozen=True) == frozen
    after = hashes(model, frozen=False)
    assert [n for n in trained if after[n] == trained[n]] == []
    oelm.verify(model)
    assert_same_model(oelm.load(tmp_path / "checkpoint-3"), model)


def test_a_model_built_anew_resumes_and_ends_with_its_best_checkpoint(tmp_path):
    best = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    first = model_with_method("bert")
    _train(first, str(tmp_path), **best)
    model = lively_model("bert", seed=1)
    oelm.apply(model, "oelm-freeze")
    trainer = _train(model, str(tmp_path), resume=True, **(best | {"max_steps": 5}))
    oelm.verify(model)
    assert hashes(model, frozen=True) == hashes(first, frozen=True)
    assert_same_model(oelm.load(trainer.state.best_model_checkpoint), model.eval())


def test_a_checkpoint_without_a_record_is_refused_with_the_way_out(tmp_path):
    """Checkpoints that oelm 0.1 left behind have their record in config.json alone."""
    _train(model_with_method("gpt2"), str(tmp_path))
    file = tmp_path / "checkpoint-3" / "model.safetensors"
    tensors = {key: value for key, value in load_file(file).items() if "load_with_oelm" not in key}
    save_file(tensors, file, metadata={"format": "pt"})
    model = lively_model("gpt2", seed=1)
    oelm.apply(model, "oelm-freeze")
    with pytest.raises(oelm.FreezeError, match=r"load the folder that save_pretrained wrote with oelm\.load"):
        _train(model, str(tmp_path), resume=True, max_steps=4)
    loaded = oelm.load(tmp_path / "checkpoint-3")
    _train(loaded, str(tmp_path), resume=True, max_steps=4)
    oelm.verify(loaded)
