"""Muon for the matrices of the blocks, AdamW for all else: the steps of torch's own optimisers, resumed exactly."""

from pathlib import Path

import pytest
import torch
from torch import nn

import oelm
from oelm.config import OptimizerConfig, RunConfig
from oelm.evaluation.load import load_run
from oelm.models.small import small_model
from oelm.training.checkpoint import checkpoint_bytes
from oelm.training.engine import train
from oelm.training.optim import build_optimizer, muon_notes, set_learning_rate
from oelm.training.parallel import World
from oelm.training.step import Stepper, uses_graphs
from oelm.training.tasks.open import open_task
from tests.support.training import assert_same_run, checkpoint_tensors, config, read, run_here, weights

CPU = torch.device("cpu")
MUON = {"name": "muon"}
# What Muon trains in each block of the project's GPT with learned positions.
MATRICES = ("attn.q_proj", "attn.k_proj", "attn.v_proj", "attn.o_proj", "mlp.fc_in", "mlp.fc_out")


def trained_by_muon(model: nn.Module, **options: object) -> set[str]:
    """Return the names of the parameters that Muon trains; require that AdamW has all other trainable ones."""
    optimizer = build_optimizer(model, OptimizerConfig(**MUON, **options), CPU)
    ids = {id(p): group["muon"] for group in optimizer.param_groups for p in group["params"]}
    assert ids.keys() == {id(p) for p in model.parameters() if p.requires_grad}
    return {name for name, p in model.named_parameters() if ids.get(id(p))}


def test_a_run_takes_the_steps_of_torchs_optimisers(tmp_path):
    """Warm-up, cosine, clip and decay included. Muon rounds to bfloat16, so a last bit of the norm may grow."""
    changes = {
        "model": {"fields": {"dropout": 0.0}},
        "optimizer": {**MUON, "weight_decay": 0.2, "clip": 0.5, "layer_decay": 0.5, "multipliers": {"v": 3.0}},
        "train": {"max_steps": 6},
    }
    run_here(tmp_path, **changes)
    run = config(tmp_path, **changes)
    task = open_task(run)
    model = task.build_model(run).train()
    loss = task.loss(model)

    muons, decaying, others = [], [], []
    for name, parameter in model.named_parameters():
        block = name.split(".")[2] if ".h." in name else None
        factor = 0.25 if name.split(".")[1] in ("wte", "wpe") else 0.5 if block == "0" else 1.0
        factor *= 3.0 if "v_proj" in name else 1.0
        matrix = name.endswith(tuple(f"{path}.weight" for path in MATRICES))
        kind = muons if matrix else decaying if parameter.ndim > 1 else others
        kind.append({"params": [parameter], "factor": factor})
    optimisers = [
        torch.optim.Muon(muons, weight_decay=0.2, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(decaying, weight_decay=0.2, betas=(0.9, 0.95)),
        torch.optim.AdamW(others, weight_decay=0.0, betas=(0.9, 0.95)),
    ]
    for step, rate in enumerate((0.001, 0.002, 0.003, 0.003, 0.00165, 0.0003)):
        scale = 1 / task.target_count(8 * step, 8)
        (loss(**task.batch(8 * step, 8)) * torch.tensor(scale)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for optimiser in optimisers:
            for group in optimiser.param_groups:
                group["lr"] = rate * group["factor"]
            optimiser.step()
            optimiser.zero_grad()
    trained = weights(run.folder)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), trained[name], rtol=0, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("name", "method", "expected", "left"),
    [
        ("oelm-gpt", "baseline", MATRICES, ("wte.weight", "ln_1.weight", "fc_in.bias")),
        ("oelm-gpt", "oelm-freeze", MATRICES[2:], ("wte.weight",)),
        ("oelm-gpt", "oelm-core", MATRICES[2:], ("q_proj.core",)),
        ("oelm-gpt-latent", "baseline", ("down_proj", "channel.q_proj", "mlp.gate"), ("latent_norm.weight",)),
        ("gpt2", "baseline", ("attn.c_attn", "mlp.c_proj"), ("wpe.weight", "c_attn.bias")),
        ("gpt2", "oelm-nofreeze", ("attn.c_attn.q", "attn.c_attn.v"), ("wte.weight",)),
        ("bert", "baseline", ("self.query", "output.dense"), ("word_embeddings.weight", "pooler.dense.weight")),
        ("mixtral", "baseline", ("self_attn.q_proj",), ("experts.gate_up_proj", "experts.down_proj")),
        ("t5", "baseline", ("SelfAttention.q", "EncDecAttention.k"), ("relative_attention_bias.weight",)),
    ],
)
def test_muon_has_the_matrices_of_the_blocks_alone(name, method, expected, left):
    model = small_model(name)
    oelm.apply(model, method)
    matrices = trained_by_muon(model)
    parameters = dict(model.named_parameters())
    assert all(parameters[each].ndim == 2 and each.endswith(".weight") for each in matrices)
    for path in expected:
        assert any(each.endswith(f"{path}.weight") for each in matrices), path
    for ending in left:
        assert any(each.endswith(ending) for each in parameters), ending
        assert not any(each.endswith(ending) for each in matrices), ending


def test_taps_adapters_and_what_an_orthogonal_key_is_made_of_are_adamws():
    model = small_model("oelm-gpt-modern", convolution=3, orthogonal_key=True)
    matrices = trained_by_muon(model)
    assert not [name for name in matrices if "taps" in name or "k_proj" in name]
    assert any("q_proj" in name for name in matrices)
    pytest.importorskip("peft", reason="peft is not installed")
    adapted = small_model("oelm-gpt")
    oelm.apply(adapted, {"preset": "oelm-freeze", "adapter": {"kind": "lora", "rank": 2, "targets": ["q", "k"]}})
    assert not [name for name in trained_by_muon(adapted) if "lora" in name]


@pytest.mark.parametrize("shape", [(64, 64), (64, 256), (256, 64)])
def test_an_update_is_as_large_as_adamws(shape):
    """At a root mean square of about 0.2 of the rate one rate serves both optimisers."""
    torch.manual_seed(0)
    parameter = nn.Parameter(torch.zeros(shape))
    optimizer = torch.optim.Muon([parameter], lr=0.01, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    parameter.grad = torch.randn(shape) * 1e-3
    optimizer.step()
    assert float(parameter.detach().square().mean().sqrt()) == pytest.approx(0.2 * 0.01, rel=0.25)


def test_frozen_weights_do_not_move_and_have_no_state(tmp_path):
    changes = {
        "method": "oelm-freeze",
        "optimizer": {**MUON, "learning_rate": 0.01, "weight_decay": 0.5},
        "train": {"max_steps": 30},
    }
    result = run_here(tmp_path, **changes)
    run = config(tmp_path, **changes)
    model = open_task(run).build_model(run)
    oelm.apply(model, "oelm-freeze", run.seed)
    after, stored = weights(run.folder), checkpoint_tensors(run.folder)
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, after[name])}
    assert changed == {name for name, p in model.named_parameters() if p.requires_grad}
    states = {kind: {key.removeprefix(f"{kind}/") for key in stored if key.startswith(f"{kind}/")} for kind in STATES}
    assert states["momentum_buffer"] == {f"transformer.h.{n}.{path}.weight" for n in (0, 1) for path in MATRICES[2:]}
    assert states["exp_avg"] == states["exp_avg_sq"] == changed - states["momentum_buffer"]
    assert result["val_loss"] < 5.0
    oelm.verify(load_run(run.folder, last=True))


STATES = ("momentum_buffer", "exp_avg", "exp_avg_sq", "step")


@pytest.mark.parametrize("at", [5, 7])
def test_a_resumed_run_ends_with_the_same_bits(at, tmp_path, monkeypatch):
    """The checkpoint is that of step 5, after the first layer's Q and K began to train and before the second's."""
    unfreezing = {"preset": "oelm-freeze", "schedule": {"kind": "unfreeze", "steps": [3, 8]}}
    changes = {"optimizer": MUON, "method": unfreezing, "train": {"micro_batch_size": 4}}

    class Killed(Exception):
        pass

    def dying(stepper: Stepper, state: object) -> None:
        if state.step == at:
            raise Killed
        step(stepper, state)

    step = Stepper.step
    with monkeypatch.context() as patch:
        patch.setattr(Stepper, "step", dying)
        with pytest.raises(Killed):
            run_here(tmp_path / "cut", **changes)
    run_here(tmp_path / "cut", **changes)
    run_here(tmp_path / "whole", **changes)
    assert_same_run(config(tmp_path / "cut", **changes).folder, config(tmp_path / "whole", **changes).folder)


def test_a_step_with_a_non_finite_gradient_leaves_the_weights_alone(tmp_path):
    changes = {"optimizer": {**MUON, "learning_rate": 1e30}, "train": {"skip_nonfinite": 12}}
    result = run_here(tmp_path, **changes)
    assert 0 < result["skipped_steps"] < 12
    assert all(bool(torch.isfinite(value).all()) for value in weights(config(tmp_path, **changes).folder).values())


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_the_room_for_a_checkpoint_is_that_of_its_tensors(name, tmp_path):
    model = small_model("oelm-gpt")
    oelm.apply(model, "oelm-freeze")
    optimizer = build_optimizer(model, OptimizerConfig(name=name), CPU)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    set_learning_rate(optimizer, 1e-3)
    optimizer.step()
    state = sum(v.nbytes for values in optimizer.state.values() for v in values.values() if v.ndim)
    assert checkpoint_bytes(model, optimizer) == state + sum(p.nbytes for p in model.parameters())


def test_steps_are_not_recorded_and_the_run_says_so(tmp_path):
    task = open_task(config(tmp_path))
    gpu = World(0, 1, torch.device("cuda", 0))
    for name, recorded in (("adamw", True), ("muon", False)):
        assert uses_graphs(config(tmp_path, optimizer={"name": name}), gpu, task) is recorded
    with pytest.raises(oelm.ConfigError, match=r"train\.graphs does not go with optimizer\.name 'muon'"):
        uses_graphs(config(tmp_path, optimizer=MUON, train={"graphs": True}), gpu, task)
    (note,) = muon_notes(small_model("oelm-gpt"), OptimizerConfig(**MUON), gpu.device)
    assert "launched kernel by kernel" in note


def test_a_fused_projection_is_noted():
    (note,) = muon_notes(small_model("gpt2"), OptimizerConfig(**MUON), CPU)
    assert "c_attn.weight is q, k, v in one tensor" in note
    split = small_model("gpt2")
    oelm.apply(split, "oelm-nofreeze")
    assert muon_notes(split, OptimizerConfig(**MUON), CPU) == []
    assert muon_notes(small_model("gpt2"), OptimizerConfig(), CPU) == []


def test_an_exported_run_names_its_optimiser(tmp_path: Path):
    changes = {"optimizer": MUON, "train": {"max_steps": 2}}
    train(config(tmp_path, **changes), quiet=True)
    from oelm.evaluation.training_facts import training_facts

    assert ("optimiser", "Muon for matrices, AdamW") in training_facts(config(tmp_path, **changes).folder).settings


def test_runs_with_adamw_keep_the_ids_of_the_time_when_there_was_no_other():
    """So that they resume and count as done; a run with Muon has another id."""
    record = Path(__file__).parents[2] / "results/forms-65m/modern-norm-lr-2e-3/baseline/seed-0/config.json"
    assert "name" not in read(record)["optimizer"]
    assert RunConfig.load(record).id == read(record)["id"]
    assert RunConfig.load(record, ["optimizer.name=adamw"]).id == read(record)["id"]
    assert RunConfig.load(record, ["optimizer.name=muon"]).id != read(record)["id"]


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_a_run_on_a_gpu_learns_skips_and_says_how_it_steps(compiled, tmp_path):
    gpu = {"device": "cuda", "compile": compiled}
    changes = {"method": "oelm-freeze", "optimizer": {**MUON, "learning_rate": 0.01}}
    result = run_here(tmp_path / "learns", **changes, train={**gpu, "max_steps": 30})
    assert result["val_loss"] < 5.0
    assert any("launched kernel by kernel" in note for note in result["notes"])
    diverging = {"optimizer": {**MUON, "learning_rate": 1e30}, "train": {**gpu, "skip_nonfinite": 12}}
    assert 0 < run_here(tmp_path / "skips", **diverging)["skipped_steps"] < 12
    trained = weights(config(tmp_path / "skips", **diverging).folder)
    assert all(bool(torch.isfinite(value).all()) for value in trained.values())
