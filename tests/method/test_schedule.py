"""Schedules whose events are shares of a run's steps: resolved to steps, applied, recorded and refused."""

import json

import pytest

import oelm
from oelm import Method, MethodError
from oelm.method.events import events
from oelm.method.schedule import advance
from oelm.method.spec import PRESETS
from oelm.models.small import small_model

FREEZE = "oelm-freeze"


def with_shares(kind: str, *shares: float, **fields: object) -> Method:
    return Method.load({"preset": FREEZE, "schedule": {"kind": kind, "shares": shares, **fields}})


@pytest.mark.parametrize(
    ("shares", "total", "steps"),
    [
        ((0.1,), 1000, (100,)),
        ((0.29,), 100, (29,)),  # 28.999999999999996 in floating point
        ((0.1, 0.5, 0.9), 12, (1, 6, 10)),
        ((0.1,), 3, (1,)),  # never before the first step
        ((1 / 3, 2 / 3), 30, (10, 20)),
    ],
)
def test_shares_are_whole_steps_of_a_run(shares, total, steps):
    resolved = with_shares("unfreeze", *shares).resolve(total)
    assert resolved.schedule.steps == steps
    assert resolved.resolve(total) == resolved, "resolving again changes nothing"
    assert Method.load(json.loads(resolved.to_json())) == resolved


def test_a_method_without_shares_is_its_own_resolution_and_keeps_its_json():
    """Ids of runs are hashes of it: those of earlier runs stay the same."""
    for preset in PRESETS.values():
        if not preset.schedule.shares:
            assert preset.resolve(5) is preset
            assert "shares" not in preset.model_dump()["schedule"]
    steps = Method.load({"preset": FREEZE, "schedule": {"kind": "unfreeze", "steps": [3, 7]}})
    assert steps.resolve(5) is steps


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({"kind": "unfreeze", "shares": [0.5, 0.2]}, r"shares \[0.5, 0.2\] must rise"),
        ({"kind": "unfreeze", "shares": [0.0]}, "greater than 0"),
        ({"kind": "unfreeze", "shares": [1.0]}, "less than 1"),
        ({"kind": "unfreeze", "shares": [0.1], "steps": [3, 4]}, "give one of the two"),
        ({"kind": "freeze", "shares": [0.1, 0.2]}, r"'freeze' needs exactly one .* shares \[0.1, 0.2\]"),
        ({"kind": "static", "shares": [0.1]}, r"'static' needs none .* shares \[0.1\]"),
        ({"kind": "unfreeze", "shares": [0.1], "layers_each": 0}, "layers_each"),
        ({"kind": "unfreeze", "shares": [0.1], "layers_each": "most"}, "layers_each"),
    ],
)
def test_schedules_that_make_no_sense_are_refused(schedule, message):
    with pytest.raises(MethodError, match=message):
        Method.load({"preset": FREEZE, "schedule": schedule})


def test_runs_that_are_too_short_and_steps_that_disagree_are_refused():
    with pytest.raises(MethodError, match=r"\[0.1, 0.2\] of a run of 4 steps are its steps \[1, 1\]: .*too short"):
        with_shares("unfreeze", 0.1, 0.2).resolve(4)
    with pytest.raises(MethodError, match=r"of a run of 1 steps .* too short"):
        with_shares("freeze", 0.5).resolve(1)
    both = Method.load({"preset": FREEZE, "schedule": {"kind": "freeze", "shares": [0.5], "steps": [7]}})
    assert both.resolve(14) == both
    with pytest.raises(MethodError, match=r"its steps \[10\], and schedule.steps are \[7\]"):
        both.resolve(20)


def test_unresolved_shares_are_refused_and_the_message_says_what_to_call():
    model, method = small_model("bert"), with_shares("unfreeze", 0.1)
    with pytest.raises(MethodError, match=r"shares \[0.1\] .* method.resolve\(total_steps\)"):
        oelm.apply(model, method)
    assert oelm.audit(model).method == "baseline"
    with pytest.raises(MethodError, match=r"method.resolve\(total_steps\)"):
        events(model, method)


@pytest.mark.parametrize("layers_each", ["all", 3, 99])
def test_one_event_can_unfreeze_all_layers(layers_each):
    model = small_model("bert")
    oelm.apply(model, with_shares("unfreeze", 0.1, layers_each=layers_each).resolve(50))
    assert advance(model, 4) == []
    (event,) = advance(model, 5)
    assert (event.step, len(event.paths)) == (5, 6)
    assert oelm.verify(model).tensors == 0
    with pytest.raises(oelm.ModelError, match=f"2 steps of {layers_each} layers, but only 3 layers are frozen"):
        events(model, with_shares("unfreeze", 0.1, 0.2, layers_each=layers_each).resolve(50))


def test_freeze_early_trains_the_upper_layers_later(tmp_path):
    model, plain = small_model("gpt2"), small_model("gpt2")
    report = oelm.apply(model, PRESETS["freeze-early"].resolve(200))
    assert report.method == "freeze-early"
    frozen = [row for row in report.rows if row.frozen]
    assert [(row.layer, row.role, row.init) for row in frozen] == [("2", "q", "default"), ("2", "k", "default")]
    assert report.total == plain.num_parameters()
    model.save_pretrained(tmp_path)
    loaded = oelm.load(tmp_path)
    assert oelm.audit(loaded).method == "freeze-early"
    (event,) = advance(loaded, 20)
    assert not event.freeze
    assert all(parameter.requires_grad for parameter in loaded.parameters())
