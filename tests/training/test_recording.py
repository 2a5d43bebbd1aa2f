"""Steps recorded as CUDA graphs: the same bits as steps that are launched kernel by kernel."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from oelm.config import RunConfig
from oelm.errors import ConfigError
from oelm.training.engine import train
from oelm.training.parallel import World
from oelm.training.recording import Recording
from oelm.training.step import uses_graphs
from oelm.training.tasks import classification
from oelm.training.tasks.language import SummedLoss
from oelm.training.tasks.open import open_task
from tests.support import finetuning
from tests.support.training import config, final_tensors, metrics_without_times, run_here, tiny

GPU = {"train": {"device": "cuda", "deterministic": True}}


@pytest.fixture
def launches(monkeypatch) -> list[int]:
    """Return a list that gets an entry for every launch of a recorded step."""
    counted: list[int] = []
    launch = Recording.launch
    monkeypatch.setattr(Recording, "launch", lambda *arguments: counted.append(1) or launch(*arguments))
    return counted


def assert_same(plain: RunConfig, recorded: RunConfig) -> None:
    """Train both and compare every figure of their metrics and every bit of their weights."""
    for run in (plain, recorded):
        train(run, quiet=True)
    assert metrics_without_times(recorded.folder) == metrics_without_times(plain.folder)
    assert final_tensors(recorded.folder) == final_tensors(plain.folder)


@pytest.mark.parametrize(
    ("changes", "problem"), [({}, "needs a GPU"), ({"gradient_checkpointing": True}, "gradient_checkpointing")]
)
def test_a_run_that_cannot_be_recorded_is_refused(changes, problem, tmp_path):
    with pytest.raises(ConfigError, match=problem):
        run_here(tmp_path, train={"graphs": True, **changes})
    assert not config(tmp_path).folder.exists()


@pytest.mark.parametrize(
    ("expected", "settings", "world", "fixed_shapes"),
    [
        (True, {}, (1, "cuda"), True),
        (False, {}, (1, "cpu"), True),
        (False, {}, (2, "cuda"), True),
        (False, {}, (1, "cuda"), False),
        (False, {"compile": False}, (1, "cuda"), True),
        (False, {"gradient_checkpointing": True}, (1, "cuda"), True),
        (False, {"graphs": False}, (1, "cuda"), True),
        (True, {"graphs": True, "compile": False}, (1, "cuda"), False),
    ],
)
def test_steps_are_recorded_where_one_process_compiles_one_shape(expected, settings, world, fixed_shapes, tmp_path):
    run, task = config(tmp_path, train={"compile": "auto", **settings}), SimpleNamespace(fixed_shapes=fixed_shapes)
    assert uses_graphs(run, World(0, world[0], torch.device(world[1])), task) == expected


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("arm", ["plain", "accumulated", "unclipped", "frozen", "unfreezing", "skipping"])
def test_a_recorded_run_equals_one_launched_kernel_by_kernel(arm, compiled, tmp_path, launches):
    arms = {
        "plain": {},
        "accumulated": {"train": {"micro_batch_size": 2}},
        "unclipped": {"optimizer": {"clip": 0.0}},
        "frozen": {"method": "oelm-freeze"},
        "unfreezing": {"method": {"preset": "oelm-freeze", "schedule": {"kind": "unfreeze", "steps": [4, 8]}}},
        "skipping": {"train": {"skip_nonfinite": 12}, "optimizer": {"learning_rate": 1e30}},
    }
    changes = arms[arm]

    def run(name: str, graphs: bool) -> RunConfig:
        own = {"graphs": graphs, "compile": compiled, **GPU["train"], **changes.get("train", {})}
        return config(tmp_path / name, **{**changes, "train": own})

    assert_same(run("plain", False), run("recorded", True))
    # The first step of a shape is launched kernel by kernel, and so is the first after each change of what trains.
    assert len(launches) == (9 if arm == "unfreezing" else 11)


@pytest.mark.gpu
def test_a_recorded_run_resumes_exactly(tmp_path, launches):
    changes = {"train": {**GPU["train"], "graphs": True}}
    whole = config(tmp_path / "whole", **changes)
    train(whole, quiet=True)
    stopped = config(tmp_path / "stopped", **changes)

    class Killed(Exception):
        pass

    def die_after(count: int) -> None:
        launch = Recording.launch

        def dying(*arguments):
            if len(launches) >= count:
                raise Killed
            return launch(*arguments)

        patch.setattr(Recording, "launch", dying)

    launches.clear()
    with pytest.MonkeyPatch.context() as patch:
        die_after(7)
        with pytest.raises(Killed):
            train(stopped, quiet=True)
    train(stopped, quiet=True)
    assert final_tensors(stopped.folder) == final_tensors(whole.folder)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_batches_of_several_widths_have_a_recording_each(compiled, tmp_path, monkeypatch, launches):
    monkeypatch.setattr(classification, "uses_few_widths", lambda _: True)  # also for the run that is not recorded

    def run(name: str, graphs: bool) -> RunConfig:
        return finetuning.config(tmp_path / name, train={**GPU["train"], "compile": compiled, "graphs": graphs})

    plain, recorded = run("plain", False), run("recorded", True)
    assert_same(plain, recorded)
    task = open_task(recorded)
    widths = {task.batch(16 * step, 16)["input_ids"].shape[1] for step in range(recorded.train.max_steps)}
    assert len(widths) > 1
    # The first step of a width is launched kernel by kernel.
    assert len(launches) == recorded.train.max_steps - len(widths)


@pytest.mark.gpu
def test_a_recorded_decoder_of_transformers_equals_one_launched_kernel_by_kernel(tmp_path, launches):
    def run(name: str, graphs: bool) -> RunConfig:
        fields = tiny(tmp_path / name, train={**GPU["train"], "graphs": graphs, "compile": False})
        return RunConfig.load(fields | {"model": {"name": "random:gpt2", "fields": {"vocab_size": 400}}})

    assert_same(run("plain", False), run("recorded", True))
    assert len(launches) == 11


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_a_recorded_run_that_fills_masks_equals_one_launched_kernel_by_kernel(family, compiled, tmp_path, launches):
    def run(name: str, graphs: bool) -> RunConfig:
        fields = tiny(tmp_path / name, train={**GPU["train"], "graphs": graphs, "compile": compiled})
        return RunConfig.load(fields | {"task": "masked-language", "model": {"name": f"random:{family}"}})

    assert_same(run("plain", False), run("recorded", True))
    assert len(launches) == 11


@pytest.mark.gpu
def test_a_step_that_cannot_be_recorded_is_launched_and_noted(tmp_path, monkeypatch, launches):
    forward = SummedLoss.forward

    def waiting(self: nn.Module, **batch: torch.Tensor) -> torch.Tensor:
        assert batch["inputs"].sum().item() >= 0  # the host waits for the device, which cannot be recorded
        return forward(self, **batch)

    plain = config(tmp_path / "plain", train={**GPU["train"], "graphs": False, "compile": False})
    train(plain, quiet=True)
    monkeypatch.setattr(SummedLoss, "forward", waiting)
    fallen_back = config(tmp_path / "recorded", train={**GPU["train"], "graphs": True, "compile": False})
    result = train(fallen_back, quiet=True)
    assert not launches
    assert [note for note in result["notes"] if "launched one by one" in note]
    assert final_tensors(fallen_back.folder) == final_tensors(plain.folder)
