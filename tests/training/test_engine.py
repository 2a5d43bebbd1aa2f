"""The training engine: one step, what trains and what does not, and what happens when something goes wrong."""

import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import oelm
from oelm import analysis
from oelm.base.files import read_json, write_json
from oelm.cli.app import app
from oelm.config import OptimizerConfig
from oelm.errors import ConfigError, TrainingError
from oelm.evaluation.load import load_run
from oelm.method import events as schedule_events
from oelm.models.run_model import build_language_model
from oelm.models.small import small_model
from oelm.runs.folder import read_metrics
from oelm.training.checkpoint import TrainState, list_checkpoints, read_checkpoint
from oelm.training.length import RunLength
from oelm.training.optim import (
    Placement,
    build_optimizer,
    learning_rate,
    parameter_groups,
    placements,
    set_learning_rate,
)
from oelm.training.step import Stepper
from oelm.training.tasks.language import SummedLoss
from tests.support.training import (
    checkpoint_tensors,
    config,
    final_tensors,
    metrics_without_times,
    read,
    result_without_times,
    run_here,
    tiny,
    token_folder,
    weights,
    write_yaml,
)

NO_DROPOUT = {"fields": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "dropout": 0.0}}
UNFREEZE = {"preset": "oelm-freeze", "schedule": {"kind": "unfreeze", "steps": [4, 8]}}
FREEZE = {"preset": "oelm-qk-ffn", "schedule": {"kind": "freeze", "steps": [5]}}


def tiny_model(output: Path, method: object = "baseline", **changes: object):
    run = config(output, method=method, **changes)
    model = build_language_model(run.model, 400, run.data.sequence_length, run.seed)
    oelm.apply(model, run.method, run.seed)
    return model


def checkpoint_names(run: Path) -> list[str]:
    return [path.name for path in list_checkpoints(run / "checkpoints")]


def last_state(run: Path) -> TrainState:
    return read_checkpoint(list_checkpoints(run / "checkpoints")[-1]).state


def assert_close(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], tolerance: float) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name], right[name], atol=tolerance, rtol=0, msg=name)


# One step


@pytest.mark.parametrize("micro", [1, 4, 8])
def test_weights_do_not_depend_on_the_micro_batch_size(micro, tmp_path):
    """After several steps of 16 sequences, up to rounding."""
    whole = {"model": NO_DROPOUT, "train": {"batch_size": 16}}
    run_here(tmp_path / "whole", **whole)
    run_here(tmp_path / "parts", **{**whole, "train": {"batch_size": 16, "micro_batch_size": micro}})
    left, right = (weights(config(tmp_path / name, **whole).folder) for name in ("whole", "parts"))
    start = tiny_model(tmp_path, model=NO_DROPOUT).state_dict()
    assert max(float((left[name] - start[name]).abs().max()) for name in left) > 0.01, "12 steps move the weights"
    assert_close(left, right, 2e-5)


def test_the_loss_is_the_mean_over_all_tokens_of_the_window(tmp_path):
    """With a learning rate near zero, the first line of metrics is the loss of the untrained model."""
    changes = {"model": NO_DROPOUT, "optimizer": {"learning_rate": 1e-30}, "train": {"micro_batch_size": 2}}
    run_here(tmp_path, **changes)
    run = config(tmp_path, **changes)
    from oelm.training.tasks.language import LanguageModelling

    task = LanguageModelling.open(run)
    model = tiny_model(tmp_path, model=NO_DROPOUT).eval()
    batch = task.batch(0, 3 * 8)
    with torch.no_grad():
        logits = model(batch["inputs"]).logits
        expected = nn.functional.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
    first = next(line for line in read_metrics(run.folder) if line.kind == "train")
    assert first.step == 3
    assert first.loss == pytest.approx(float(expected), abs=1e-5)
    assert first.tokens == 3 * 8 * 32


def test_gradients_are_clipped_to_the_norm(tmp_path, monkeypatch):
    norms = []
    adamw_step = torch.optim.AdamW.step

    def note_norm(optimizer, *arguments):
        gradients = [p.grad for group in optimizer.param_groups for p in group["params"]]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))
        return adamw_step(optimizer, *arguments)

    monkeypatch.setattr(torch.optim.AdamW, "step", note_norm)
    run_here(tmp_path / "tight", optimizer={"clip": 0.01}, train={"max_steps": 3})
    assert norms == pytest.approx([0.01] * 3, rel=1e-3)
    run_here(tmp_path / "off", optimizer={"clip": 0.0}, train={"max_steps": 3})
    assert min(norms[3:]) > 0.1
    logged = [line for line in read_metrics(config(tmp_path / "tight").folder) if line.kind == "train"]
    assert logged[0].gradient_norm > 0.1, "the logged norm is the one before clipping"


def test_gradient_checkpointing_does_not_change_the_weights(tmp_path):
    run_here(tmp_path / "plain")
    run_here(tmp_path / "saving", train={"gradient_checkpointing": True})
    left, right = (weights(config(tmp_path / name).folder) for name in ("plain", "saving"))
    assert_close(left, right, 1e-6)


def test_training_restores_the_settings_of_torch(tmp_path):
    assert not torch.are_deterministic_algorithms_enabled()
    run_here(tmp_path, train={"max_steps": 1})
    assert not torch.are_deterministic_algorithms_enabled()


# What trains


@pytest.mark.parametrize("method", ["baseline", "oelm-freeze", "oelm-core", "identity-key", "oelm-qk-ffn"])
def test_frozen_tensors_do_not_change_and_all_others_do(method, tmp_path):
    """In 40 steps with weight decay the loss falls, and frozen tensors keep every bit."""
    changes = {"method": method, "train": {"max_steps": 40}, "optimizer": {"learning_rate": 0.01, "weight_decay": 0.5}}
    result = run_here(tmp_path, **changes)
    run = config(tmp_path, **changes).folder
    before, after = tiny_model(tmp_path, method), weights(run)
    changed = {name for name, p in before.named_parameters() if not torch.equal(p, after[name])}
    assert changed == {name for name, p in before.named_parameters() if p.requires_grad}
    losses = [line["loss"] for line in metrics_without_times(run) if line["kind"] == "train"]
    assert losses[-1] < losses[0] - 0.5

    report = oelm.audit(before)
    audit = read(run / "audit.json")
    assert (audit["total"], audit["trainable"], audit["frozen"]) == (report.total, report.trainable, report.frozen)
    assert [row["sha256"] for row in audit["rows"]] != [row.sha256 for row in report.rows]
    for row, first in zip(audit["rows"], report.rows, strict=True):
        assert row["trainable"] == first.trainable
        if not first.trainable and first.frozen:
            assert row["sha256"] == first.sha256
    counts = {key: audit[key] for key in ("total", "trainable", "frozen", "frozen_share", "buffers")}
    assert result["parameters"] == counts
    assert counts["frozen"] > 0 or method in ("baseline", "identity-key")
    stored = {key.removeprefix("exp_avg/") for key in checkpoint_tensors(run) if key.startswith("exp_avg/")}
    assert stored == changed, "a frozen tensor has no optimiser state"
    oelm.verify(load_run(run))
    oelm.verify(load_run(run, last=True))


def trained_at(run: Path, step: int) -> set[str]:
    """Return the checkpoint_names of the tensors with optimiser state in the checkpoint of a step."""
    from safetensors import safe_open

    with safe_open(run / f"checkpoints/step-{step:08d}/tensors.safetensors", framework="pt") as file:
        return {key.removeprefix("exp_avg/") for key in file.keys() if key.startswith("exp_avg/")}  # noqa: SIM118


def test_an_unfreeze_schedule_trains_each_layer_from_its_step_on(tmp_path):
    changes = {"method": UNFREEZE, "checkpoint": {"every": 2, "keep": 9}}
    result = run_here(tmp_path, **changes)
    run = config(tmp_path, **changes).folder
    events = [line for line in metrics_without_times(run) if line["kind"] == "event"]
    assert [(line["step"], line["event"]) for line in events] == [(4, "unfreeze"), (8, "unfreeze")]
    assert [line["matrices"] for line in events] == [
        [f"transformer.h.{layer}.attn.{role}_proj" for role in "qk"] for layer in (1, 0)
    ]
    frozen = oelm.audit(tiny_model(tmp_path, UNFREEZE)).frozen
    assert frozen == 2 * 2 * 32 * 32
    total = result["parameters"]["total"]
    assert [line["trainable"] for line in events] == [total - frozen // 2, total]
    assert result["parameters"]["frozen"] == 0
    assert read(run / "audit.json")["frozen"] == 0

    queries = [{name for name in trained_at(run, step) if "q_proj" in name} for step in (4, 6, 8, 10)]
    both = {f"transformer.h.{layer}.attn.q_proj.weight" for layer in (0, 1)}
    assert queries == [set(), {max(both)}, {max(both)}, both]
    stored = checkpoint_tensors(run)
    steps = {name: int(stored[f"step/transformer.h.{name}.weight"]) for name in ("0.attn.q_proj", "1.attn.q_proj")}
    assert steps == {"0.attn.q_proj": 4, "1.attn.q_proj": 8}, "the optimiser counts from the unfreezing"
    assert int(stored["step/transformer.wte.weight"]) == 12, "and from step 0 for tensors that trained from the start"
    before, after = dict(tiny_model(tmp_path, UNFREEZE).named_parameters()), weights(run)
    assert all(not torch.equal(before[name], after[name]) for name in both)
    oelm.verify(load_run(run, last=True))


def test_a_schedule_is_planned_only_at_its_events(tmp_path, monkeypatch):
    """Planning takes longer than everything else that a step does on the host, and steps are timed."""
    calls, plan = [], schedule_events.plan
    monkeypatch.setattr(schedule_events, "plan", lambda *arguments: calls.append(1) or plan(*arguments))
    run_here(tmp_path, method=UNFREEZE)
    assert len(calls) == 3, "before the first step, and at each of two events"


def test_a_freeze_schedule_keeps_the_weights_of_its_step(tmp_path):
    changes = {"method": FREEZE, "checkpoint": {"every": 5, "keep": 9}}
    result = run_here(tmp_path, **changes)
    run = config(tmp_path, **changes).folder
    (event,) = [line for line in metrics_without_times(run) if line["kind"] == "event"]
    assert (event["step"], event["event"], len(event["matrices"])) == (5, "freeze", 8)
    assert result["parameters"]["frozen"] == 2 * (2 * 32 * 32 + 2 * 4 * 32 * 32)
    assert event["trainable"] == result["parameters"]["trainable"]
    frozen_names = trained_at(run, 5) - trained_at(run, 12)
    assert frozen_names == {f"{path}.weight" for path in event["matrices"]}
    from safetensors.torch import load_file

    at_freeze, at_end = load_file(run / "checkpoints/step-00000005/tensors.safetensors"), checkpoint_tensors(run)
    for name in frozen_names:
        assert torch.equal(at_freeze[f"model/{name}"], at_end[f"model/{name}"]), "frozen with the values of that step"
        assert not torch.equal(dict(tiny_model(tmp_path, FREEZE).named_parameters())[name], at_end[f"model/{name}"])
    verification = oelm.verify(load_run(run, last=True))
    assert verification.exact == verification.tensors == 8


# The optimiser


def test_the_optimiser_has_only_trainable_parameters_and_decays_only_matrices(tmp_path):
    model = tiny_model(tmp_path, "oelm-freeze")
    optimizer = build_optimizer(model, OptimizerConfig(weight_decay=0.25), torch.device("cpu"))
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    trainable = {id(p): p for p in model.parameters() if p.requires_grad}
    assert decay.keys() == trainable.keys()
    assert all(decay[key] == (0.25 if p.ndim > 1 else 0.0) for key, p in trainable.items())
    assert {p.ndim for p in trainable.values()} == {1, 2}


def test_a_model_without_trainable_parameters_is_refused():
    model = small_model("gpt2")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    with pytest.raises(ConfigError, match="nothing in this model is trainable"):
        parameter_groups(model, OptimizerConfig())


def rates(model: nn.Module, options: OptimizerConfig, rate: float = 1.0) -> dict[str, float]:
    optimizer = build_optimizer(model, options, torch.device("cpu"))
    set_learning_rate(optimizer, rate)
    by_id = {id(p): group["lr"] for group in optimizer.param_groups for p in group["params"]}
    return {name: by_id[id(p)] for name, p in model.named_parameters() if id(p) in by_id}


def test_learning_rates_follow_layer_decay_and_role_multipliers(tmp_path):
    model = tiny_model(tmp_path, "oelm-core")
    options = OptimizerConfig(layer_decay=0.5, multipliers={"core": 10.0, "v": 3.0, "norm": 0.0, "embedding": 2.0})
    by_name = rates(model, options, 0.1)
    expected = {
        "transformer.h.1.attn.q_proj.core": 1.0,
        "transformer.h.0.attn.q_proj.core": 0.5,
        "transformer.h.1.attn.v_proj.weight": 0.3,
        "transformer.h.0.attn.v_proj.weight": 0.15,
        "transformer.h.1.attn.o_proj.weight": 0.1,
        "transformer.h.0.mlp.fc_in.weight": 0.05,
        "transformer.h.0.mlp.fc_in.bias": 0.05,
        "transformer.h.1.mlp.fc_out.weight": 0.1,
        "transformer.h.1.ln_1.weight": 0.0,
        "transformer.ln_f.bias": 0.0,
        "transformer.wte.weight": 0.1 * 2.0 * 0.25,
        "transformer.wpe.weight": 0.1 * 2.0 * 0.25,
    }
    assert {name: by_name[name] for name in expected} == pytest.approx(expected)
    assert "transformer.h.0.attn.q_proj.weight" not in by_name, "the basis is frozen"


@pytest.mark.parametrize(
    ("name", "below"),
    [
        ("bert", {"bert.embeddings.LayerNorm": "norm"}),
        ("distilbert", {"distilbert.embeddings.LayerNorm": "norm"}),
        ("electra", {"electra.embeddings.LayerNorm": "norm", "electra.embeddings_project": "embedding"}),
        ("albert", {"albert.embeddings.LayerNorm": "norm", "albert.encoder.embedding_hidden_mapping_in": "embedding"}),
        ("opt", {"model.decoder.project_in": "embedding"}),
    ],
)
def test_parameters_of_the_embeddings_are_placed_below_the_first_block(name, below):
    model = small_model(name, **({"word_embed_proj_dim": 24} if name == "opt" else {}))
    places, blocks = placements(model), 1 if name == "albert" else 3
    for module, role in below.items():
        placed = {place for parameter, place in places.items() if parameter.rpartition(".")[0] == module}
        assert placed == {Placement(role, blocks)}
    embeddings = {place for place in places.values() if place.role == "embedding"}
    assert embeddings == {Placement("embedding", blocks)}
    assert {place.above for place in places.values() if place.role == "head"} <= {0}


@pytest.mark.parametrize(
    "name",
    [*("gpt2", "llama", "gpt_neox", "oelm-gpt", "oelm-gpt-latent"), *("bert", "electra", "albert", "distilbert")],
)
def test_a_multiplier_changes_the_rate_of_its_role_and_no_other(name):
    model = small_model(name)
    oelm.apply(model, "oelm-nofreeze")  # splits a fused projection into Q, K and V
    roles = {place.role for place in placements(model).values()}
    assert {"q", "k", "v", "o", "ffn_in", "ffn_out", "embedding", "norm"} <= roles
    for role in roles:
        by_name = rates(model, OptimizerConfig(multipliers={role: 7.0}))
        assert {n for n, rate in by_name.items() if rate == 7.0} == {
            n for n, place in placements(model).items() if place.role == role
        }


def test_every_form_of_the_gpts_attention_has_its_roles():
    """A latent and a channel have roles of their own; their norm, and those of queries and keys, are norms."""
    latent = placements(small_model("oelm-gpt-latent", qk_norm="query"))
    assert {name: latent[f"transformer.h.2.attn.{name}.weight"] for name in ("down_proj", "latent_norm", "q_norm")} == {
        "down_proj": Placement("down", 0),
        "latent_norm": Placement("norm", 0),
        "q_norm": Placement("norm", 0),
    }
    assert latent["transformer.h.0.attn.channel.q_proj.weight"] == Placement("channel_q", 2)
    assert latent["transformer.h.0.attn.channel.k_proj.weight"] == Placement("channel_k", 2)
    gated = placements(small_model("oelm-gpt-modern", convolution=3, orthogonal_key=True))
    assert gated["transformer.h.1.attn.lookback.key_taps"] == Placement("convolution", 1)
    assert gated["transformer.h.1.attn.k_proj.parametrizations.weight.original"] == Placement("k", 1)
    assert gated["transformer.h.1.mlp.gate.weight"] == Placement("ffn_in", 1)


def test_a_multiplier_of_a_key_that_is_the_value_too_must_be_that_of_both():
    model = small_model("oelm-gpt", shared_kv=True)
    with pytest.raises(ConfigError, match=r"k_proj.*k, v"):
        rates(model, OptimizerConfig(multipliers={"k": 2.0}))
    assert rates(model, OptimizerConfig(multipliers={"k": 2.0, "v": 2.0}))["transformer.h.0.attn.k_proj.weight"] == 2.0


def test_a_multiplier_for_part_of_a_fused_projection_is_refused():
    model = small_model("gpt2")
    with pytest.raises(ConfigError, match=r"c_attn.*q, k, v"):
        rates(model, OptimizerConfig(multipliers={"q": 2.0}))
    by_name = rates(model, OptimizerConfig(multipliers={"q": 2.0, "k": 2.0, "v": 2.0}))
    assert by_name["transformer.h.0.attn.c_attn.weight"] == 2.0
    assert by_name["transformer.h.0.ln_1.weight"] == 1.0


def test_a_multiplier_without_effect_is_noted(tmp_path):
    """The head is tied to the embedding and there is no core. Q is frozen, but the model has it."""
    options = {"multipliers": {"head": 2.0, "v": 2.0, "core": 2.0, "q": 2.0}}
    result = run_here(tmp_path, method="oelm-freeze", optimizer=options, train={"max_steps": 1})
    (note,) = result["notes"]
    assert note.startswith("optimizer.multipliers: ")
    assert note.endswith("head, core"), "the roles without effect"
    run = config(tmp_path, method="oelm-freeze").folder
    assert note in (run / "train.log").read_text()


@pytest.mark.parametrize(
    ("method", "kept"),
    [
        ("bitfit", "'bitfit' keeps the body as loaded"),
        ("freeze-pretrained", "'freeze-pretrained' keeps q, k as loaded"),
        ("oelm-freeze", None),
    ],
)
def test_a_method_that_keeps_what_was_loaded_is_noted_where_nothing_was(method, kept, tmp_path):
    notes = run_here(tmp_path, method=method, train={"max_steps": 1})["notes"]
    assert len(notes) == (kept is not None)
    if kept is not None:
        assert kept in notes[0]
        assert "starts with random weights" in notes[0]
        assert notes[0] in (config(tmp_path, method=method).folder / "train.log").read_text()


def test_an_unknown_role_is_refused():
    with pytest.raises(ConfigError, match=r"'embeding'.*'embedding'"):
        OptimizerConfig(multipliers={"embeding": 2.0})


def learning_rates(tmp_path: Path, steps: int, **options: object) -> list[float]:
    """Return the learning rate of every step of a run."""
    run = config(tmp_path, optimizer={"learning_rate": 1.0, **options}, train={"max_steps": steps})
    pace = RunLength.of(run, samples_per_epoch=1000)
    return [learning_rate(run.optimizer, pace, step) for step in range(steps)]


def test_learning_rates_of_all_schedules(tmp_path):
    cosine = learning_rates(tmp_path, 25, warmup_steps=4, schedule="cosine", floor=0.1)
    assert cosine[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert cosine[14] == pytest.approx(0.1 + 0.9 / 2), "half way down"
    assert cosine[9] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 4)))
    assert cosine[-1] == pytest.approx(0.1), "the last step is at the floor"
    linear = learning_rates(tmp_path, 25, warmup_steps=4, schedule="linear", floor=0.0)
    assert linear[:5] == cosine[:5]
    assert [linear[step] for step in (9, 14, 24)] == pytest.approx([0.75, 0.5, 0.0])
    assert learning_rates(tmp_path, 6, warmup_steps=2, schedule="constant") == [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]
    assert learning_rates(tmp_path, 3, warmup_steps=0, schedule="linear", floor=0.5) == [1.0, 0.75, 0.5]
    assert learning_rates(tmp_path, 1, warmup_steps=0) == [1.0]
    assert learning_rates(tmp_path, 2, warmup_steps=10) == pytest.approx([0.1, 0.2])


@pytest.mark.parametrize(
    ("epochs", "samples", "steps"),
    [(1.1, 400, 55), (2.2, 200, 55), (0.1, 560, 7), (3.0, 399, 150), (1.1, 401, 56), (1e-5, 400, 1)],
)
def test_fractions_of_an_epoch_give_exact_numbers_of_steps(epochs, samples, steps, tmp_path):
    run = config(tmp_path, train={"max_steps": None, "epochs": epochs, "batch_size": 8})
    assert RunLength.of(run, samples).steps == steps


def test_a_warm_up_longer_than_the_run_is_a_warning(tmp_path):
    result = run_here(tmp_path, optimizer={"warmup_steps": 1000}, train={"max_steps": 3})
    (warning,) = result["warnings"]
    assert all(number in warning for number in ("1,000 steps", "run of 3", "0.003"))
    log = (config(tmp_path).folder / "train.log").read_text()
    assert log.index(warning) < log.index("step 3/3"), "before the steps, not only after them"
    assert run_here(tmp_path / "other", optimizer={"warmup_steps": 3}, train={"max_steps": 3})["warnings"] == []


def test_the_logged_learning_rate_is_the_one_that_was_used(tmp_path):
    run_here(tmp_path)
    run = config(tmp_path)
    logged = {line.step: line.learning_rate for line in read_metrics(run.folder) if line.kind == "train"}
    pace = RunLength.of(run, samples_per_epoch=1000)
    rates = {step: learning_rate(run.optimizer, pace, step - 1) for step in (3, 6, 9, 12)}
    assert logged == pytest.approx(rates)


# Non-finite gradients


class Poisoned:
    """Makes the loss of some steps infinite, by adding an infinite multiple of one bias."""

    def __init__(self, *steps: int) -> None:
        self.steps, self.current_step = steps, -1

    def install(self, monkeypatch) -> None:
        forward, step = SummedLoss.forward, Stepper._step

        def poisoned(module, **batch):
            loss = forward(module, **batch)
            if module.training and self.current_step in self.steps:
                loss = loss + module.model.transformer.h[1].mlp.fc_in.bias.sum() * math.inf
            return loss

        def counted(stepper, state):
            self.current_step = state.step
            step(stepper, state)

        monkeypatch.setattr(SummedLoss, "forward", poisoned)
        monkeypatch.setattr(Stepper, "_step", counted)


def test_a_non_finite_gradient_stops_the_run_before_the_weights_change(tmp_path, monkeypatch):
    Poisoned(7).install(monkeypatch)
    optimizer_steps = []
    adamw_step = torch.optim.AdamW.step
    monkeypatch.setattr(
        torch.optim.AdamW, "step", lambda *arguments: optimizer_steps.append(1) or adamw_step(*arguments)
    )
    with pytest.raises(TrainingError) as error:
        run_here(tmp_path)
    message = str(error.value)
    assert "step 7 (samples 56 to 63 of the run)" in message
    assert "transformer.h.1.mlp.fc_in.bias" in message
    assert "skip_nonfinite" in message
    assert "step-00000005" in message, "the checkpoint to resume from"
    assert len(optimizer_steps) == 7
    run = config(tmp_path).folder
    assert read(run / "status.json")["state"] == "failed"
    assert "step 7" in read(run / "status.json")["message"]
    assert not (run / "result.json").exists()
    assert checkpoint_names(run) == ["step-00000005"]
    load_run(run, last=True)

    again = CliRunner().invoke(app, ["train", str(write_yaml(tmp_path / "run.yaml", tiny(tmp_path)))])
    assert again.exit_code == 2, "the command line resumes from the last checkpoint and fails in the same way"
    assert "resumed from step 5" in again.stderr
    assert "oelm: step 7 (samples 56 to 63 of the run)" in again.stderr
    assert "non-finite gradient" in again.stderr
    assert checkpoint_names(run) == ["step-00000005"]

    monkeypatch.undo()
    run_here(tmp_path)  # without the fault, the run resumes from its last checkpoint
    run_here(tmp_path / "clean")
    assert final_tensors(run) == final_tensors(config(tmp_path / "clean").folder)


@pytest.mark.parametrize("every", [1, 3, 12])
def test_allowed_non_finite_steps_are_skipped_and_noted(every, tmp_path, monkeypatch):
    """Also when the skipped step is the one that is logged."""
    Poisoned(2, 8).install(monkeypatch)
    changes = {"train": {"skip_nonfinite": 2}, "log": {"every": every}}
    result = run_here(tmp_path, **changes)
    assert result["skipped_steps"] == 2
    assert result["steps"] == 12
    assert [note.split(" (")[0] for note in result["notes"]] == ["step 2", "step 8"]
    assert "step was skipped" in result["notes"][0]
    run = config(tmp_path, **changes).folder
    assert int(checkpoint_tensors(run)["step/transformer.wte.weight"]) == 10
    lines = [line for line in metrics_without_times(run) if line["kind"] == "train"]
    for line in lines:
        if every == 1 and line["step"] in (3, 9):
            assert line["loss"] is None, "all steps of the window were skipped"
            assert line["gradient_norm"] is None
        else:
            assert 4.5 < line["loss"] < 6.2, "a skipped step counts in no mean"
    assert last_state(run).skipped == 2


def test_a_diverged_run_is_reported_by_terminal_exit_code_and_record(tmp_path):
    """The first step ruins the weights, and the others are skipped."""
    changes = {"train": {"skip_nonfinite": 3, "max_steps": 3}, "optimizer": {"learning_rate": 1e30, "warmup_steps": 0}}
    file = write_yaml(tmp_path / "run.yaml", tiny(tmp_path, **changes))
    result = CliRunner().invoke(app, ["train", str(file)])
    assert result.exit_code == 1, result.output
    warnings = read(config(tmp_path, **changes).folder / "result.json")["warnings"]
    assert "diverged" in warnings[0]
    assert "2 of 3 steps" in warnings[1]
    lines = result.stderr.splitlines()
    assert [line.removeprefix("warning: ") for line in lines if line.startswith("warning: ")] == warnings
    assert [line.endswith("2 skipped") for line in lines if line.startswith("step 3/3")] == [True]
    assert lines[-2].startswith("diverged: validation loss nan")
    again = CliRunner().invoke(app, ["train", str(file)])
    assert (again.exit_code, "diverged already" in again.stderr) == (1, True)


def test_one_non_finite_step_more_than_allowed_stops_the_run(tmp_path, monkeypatch):
    Poisoned(2, 3, 4).install(monkeypatch)
    with pytest.raises(TrainingError, match=r"step 4 .* and there is no checkpoint;"):
        run_here(tmp_path, train={"skip_nonfinite": 2})


@pytest.mark.parametrize("loss", [1000.0, math.inf, math.nan])
def test_a_non_finite_perplexity_is_recorded_as_null(loss, tmp_path, monkeypatch):
    """A model with a non-finite loss is never the best one."""
    from oelm.training import engine

    validate, measured = engine.validate, []

    def not_finite(module, task, *arguments):
        return task.metrics([loss, 1.0, *[0.0] * 2 * task.slices.count])

    def first_is_not_finite(*arguments):
        measured.append(validate(*arguments))
        return not_finite(*arguments) if len(measured) == 1 else measured[-1]

    monkeypatch.setattr(engine, "validate", first_is_not_finite)
    result = run_here(tmp_path / "first")
    run = config(tmp_path / "first").folder
    validations = [line for line in read_metrics(run) if line.kind == "val"]
    assert validations[0].perplexity is None
    assert validations[0].loss == (1000.0 if loss == 1000.0 else None)
    assert result["best_step"] in (8, 12)

    monkeypatch.setattr(engine, "validate", not_finite)
    result = run_here(tmp_path / "always")
    run = config(tmp_path / "always").folder
    assert result == read(run / "result.json")
    assert result["perplexity"] is None
    assert result["best_step"] == (4 if loss == 1000.0 else None)
    assert (run / "best").exists() == (loss == 1000.0)
    assert load_run(run).config.oelm["seed"] == 0


# Memory


class SmallMemory:
    """Simulates a device whose memory holds at most `fits` sequences in training."""

    def __init__(self, fits: int) -> None:
        self.fits = fits

    def install(self, monkeypatch) -> None:
        forward = SummedLoss.forward

        def small(module, **batch):
            if module.training and len(batch["inputs"]) > self.fits:
                raise torch.OutOfMemoryError(f"{len(batch['inputs'])} sequences")
            return forward(module, **batch)

        monkeypatch.setattr(SummedLoss, "forward", small)


def test_out_of_memory_halves_the_micro_batch(tmp_path, monkeypatch):
    SmallMemory(3).install(monkeypatch)
    result = run_here(tmp_path / "halved")
    assert [note.split(";")[0] for note in result["notes"]] == [
        "step 0: out of memory with micro-batches of 8",
        "step 0: out of memory with micro-batches of 4",
    ]
    run = config(tmp_path / "halved").folder
    assert read(run / "timing.json")["notes"] == result["notes"]
    assert result["notes"][0] == analysis.load_run(run).times_doubt, "step times before and after differ"
    assert last_state(run).micro_batch_size == 2
    assert result["tokens"] == 12 * 8 * 32
    small = run_here(tmp_path / "small", train={"micro_batch_size": 2}, eval={"batch_size": 2})
    assert final_tensors(run) == final_tensors(config(tmp_path / "small").folder)
    assert result["val_loss"] == small["val_loss"]


def test_out_of_memory_on_a_single_sequence_is_a_clear_error(tmp_path, monkeypatch):
    SmallMemory(0).install(monkeypatch)
    with pytest.raises(TrainingError, match="one sequence"):
        run_here(tmp_path)
    assert read(config(tmp_path).folder / "status.json")["state"] == "failed"


def test_halving_an_odd_batch_keeps_all_its_sequences(tmp_path, monkeypatch):
    SmallMemory(4).install(monkeypatch)
    result = run_here(tmp_path, train={"batch_size": 15, "max_steps": 2})
    assert result["tokens"] == 2 * 15 * 32
    run = config(tmp_path, train={"batch_size": 15, "max_steps": 2}).folder
    assert last_state(run).micro_batch_size == 1, "15, then 5, then 1: each divides 15"


# Validation, timing, results


def test_the_validation_loss_does_not_depend_on_the_batch_size(tmp_path):
    results = [
        run_here(tmp_path / str(size), eval={"batch_size": size, "sequences": sequences})
        for size, sequences in ((1, 12), (5, 12), (12, 12), (64, 12), (8, 10_000), (32, None))
    ]
    losses = [result["val_loss"] for result in results]
    assert losses[:4] == pytest.approx([losses[0]] * 4, abs=1e-6)
    assert losses[4] == pytest.approx(losses[5], abs=1e-6)
    assert abs(losses[4] - losses[0]) > 1e-3


def test_timing_separates_steps_from_everything_else(tmp_path):
    changes = {"method": FREEZE, "train": {"max_steps": 24}}
    result = run_here(tmp_path, **changes)
    timing = read(config(tmp_path, **changes).folder / "timing.json")
    assert timing["warmup_steps"] == 15, "five, and ten after the freeze"
    assert timing["steps"] == 9
    assert {"median", "mean", "p90"} <= timing["step_seconds"].keys()
    assert set(timing["seconds_apart"]) == {"validation", "checkpoint", "schedule", "log"}
    assert timing["step_seconds"] == result["step_seconds"]
    assert timing["tokens_per_second"] == pytest.approx(8 * 32 / timing["step_seconds"]["median"])


def test_step_times_include_only_steps(tmp_path, monkeypatch):
    """With a fake clock: a step takes 1, a log line 10, a validation 100 and a checkpoint 1,000."""
    from oelm.training import engine, timing

    clock = [0.0]

    def taking(seconds, function):
        def clocked(*arguments):
            clock[0] += seconds
            return function(*arguments)

        return clocked

    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    monkeypatch.setattr(Stepper, "step", taking(1, Stepper.step))
    monkeypatch.setattr(engine, "validate", taking(100, engine.validate))
    monkeypatch.setattr(engine, "save_checkpoint", taking(1000, engine.save_checkpoint))
    monkeypatch.setattr(engine, "_log", taking(10, engine._log))
    run_here(tmp_path, train={"max_steps": 24}, eval={"every": 6}, checkpoint={"every": 5})
    timing_record = read(config(tmp_path).folder / "timing.json")
    assert timing_record["step_seconds"] == {"median": 1.0, "mean": 1.0, "p90": 1.0, "p10": 1.0, "std": 0.0}
    assert timing_record["seconds_apart"] == {"validation": 4 * 100.0, "checkpoint": 5 * 1000.0, "log": 8 * 10.0}
    assert (timing_record["warmup_seconds"], timing_record["train_seconds"]) == (10.0, 24.0)


def test_steps_after_a_schedule_event_are_warm_up(tmp_path):
    """The code is compiled again there, which takes longer than all other steps together."""
    unfreeze = {"preset": "oelm-freeze", "schedule": {"kind": "unfreeze", "steps": [13, 26]}}
    run_here(tmp_path, method=unfreeze, train={"max_steps": 40})
    timing = read(config(tmp_path, method=unfreeze).folder / "timing.json")
    assert (timing["warmup_steps"], timing["steps"]) == (30, 3 + 3 + 4)


def test_the_timing_of_a_short_run_is_marked_as_warm_up_only(tmp_path):
    run_here(tmp_path, train={"max_steps": 5})
    timing = read(config(tmp_path).folder / "timing.json")
    assert timing["only_warmup"] is True
    assert timing["steps"] == 5


def test_the_result_agrees_with_the_other_records(tmp_path):
    changes = {"eval": {"every": 3, "targets": [1e6, 300.0, 1.0]}, "log": {"note": "on a train"}}
    result = run_here(tmp_path, **changes)
    run = config(tmp_path, **changes)
    assert result == read(run.folder / "result.json")
    validations = {line.step: line for line in read_metrics(run.folder) if line.kind == "val"}
    assert list(validations) == [3, 6, 9, 12]
    assert result["val_loss"] == validations[12].loss
    assert result["perplexity"] == math.exp(result["val_loss"])
    best = min(validations.values(), key=lambda line: line.loss)
    assert (result["best_step"], result["best_val_loss"]) == (best.step, best.loss)
    assert result["id"] == run.id
    assert result["notes"] == ["on a train"]
    assert result["reached"]["1000000.0"]["step"] == 3
    first = next(step for step, line in validations.items() if line.perplexity <= 300)
    assert result["reached"]["300.0"]["step"] == first
    assert result["reached"]["300.0"]["tokens"] == first * 8 * 32
    assert "1.0" not in result["reached"]
    environment = read(run.folder / "environment.json")
    assert environment["versions"]["torch"] == torch.__version__
    assert environment["data"]["synthetic"] is True
    assert environment["data"]["vocab_size"] == 400
    assert result_without_times(run.folder)["data"]["synthetic"] is True


def test_validation_text_in_the_training_text_is_a_warning(tmp_path):
    tokens = shutil.copytree(token_folder(), tmp_path / "tokens")
    header = read_json(tokens / "data.json")
    del header["sha256"]
    write_json(tokens / "data.json", {**header, "shared_documents": 2})
    result = run_here(tmp_path / "runs", data={"path": str(tokens)})
    assert any("validation documents are also in the training text" in warning for warning in result["warnings"])
