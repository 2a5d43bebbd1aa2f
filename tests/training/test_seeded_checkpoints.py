"""Checkpoints without the frozen matrices that the seed gives back: resumed to the same bits, and never another's."""

import pytest
import torch
from safetensors.torch import load_file

import oelm
from oelm.config import RunConfig
from oelm.errors import ConfigError, FreezeError
from oelm.evaluation.load import load_run
from oelm.models.run_model import build_language_model
from oelm.training.checkpoint import list_checkpoints, read_checkpoint
from oelm.training.engine import train
from oelm.training.step import Stepper
from tests.support.training import config, run_here

SEEDED = {"method": "oelm-random-orthogonal", "checkpoint": {"every": 5, "frozen": "seeded"}}


def stored_names(run: RunConfig) -> set[str]:
    """Return the names of the model's tensors in a run's last checkpoint."""
    tensors = load_file(list_checkpoints(run.folder / "checkpoints")[-1] / "tensors.safetensors")
    return {name for name in tensors if name.startswith("model/")}


@pytest.mark.parametrize(
    "method",
    [
        "oelm-random-orthogonal",
        "latent-random",
        {"preset": "oelm-random-orthogonal", "schedule": {"kind": "unfreeze", "steps": [4, 8]}},
    ],
    ids=str,
)
def test_a_checkpoint_without_seeded_matrices_resumes_to_the_same_bits(method, tmp_path, monkeypatch):
    latent = {"model": {"name": "gpt:modern-tiny", "fields": {"latent": 16, "channel": 8}}}
    changes = {"method": method, **(latent if method == "latent-random" else {})}
    run_here(tmp_path / "saved", **changes)
    seeded = config(tmp_path / "seeded", **{**changes, "checkpoint": SEEDED["checkpoint"]})
    step = Stepper.step

    def interrupted(stepper, state):
        if state.step == 7:
            raise KeyboardInterrupt
        step(stepper, state)

    monkeypatch.setattr(Stepper, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(seeded, quiet=True)
    assert stored_names(seeded) < stored_names(config(tmp_path / "saved", **changes))
    monkeypatch.undo()
    train(seeded, quiet=True)
    assert oelm.verify(load_run(seeded.folder, last=True))
    reference = load_run(config(tmp_path / "saved", **changes).folder, last=True).state_dict()
    for name, value in load_run(seeded.folder, last=True).state_dict().items():
        assert torch.equal(value, reference[name]), name


def test_another_seed_does_not_pass_for_the_checkpoints_own(tmp_path):
    run_here(tmp_path, **SEEDED)
    path = list_checkpoints(config(tmp_path, **SEEDED).folder / "checkpoints")[-1]
    own = config(tmp_path, method="oelm-random-orthogonal", seed=1)
    model = build_language_model(own.model, 400, own.data.sequence_length, own.seed)
    oelm.apply(model, own.method, own.seed)
    checkpoint = read_checkpoint(path)
    checkpoint.restore_frozen(model)
    with pytest.raises(FreezeError, match="content changed"):
        checkpoint.load(model)


@pytest.mark.parametrize(
    ("method", "problem"),
    [
        ("oelm-freeze", "init 'qr'"),
        ({"q": {"init": "polar", "frozen": True}}, "init 'polar'"),
        ("freeze-pretrained", "init 'pretrained'"),
        ({"preset": "oelm-random-orthogonal", "schedule": {"kind": "freeze", "steps": [5]}}, "have trained"),
    ],
)
def test_matrices_that_the_seed_does_not_give_back_are_refused(method, problem, tmp_path):
    with pytest.raises(ConfigError, match=problem):
        run_here(tmp_path, **{**SEEDED, "method": method})
    assert not config(tmp_path, **{**SEEDED, "method": method}).folder.exists()
