"""The difference of the loss by slice: its parts add up, and what is not comparable is left out."""

import json

import pytest

from oelm.analysis import analyse
from oelm.analysis.slices import slice_gaps
from tests.support.records import add_slices, change, language_run


def arms(root):
    """Write a baseline and a method that is worse on hits alone, with a little noise, and return the comparison."""
    for seed in range(3):
        noise = 0.01 * seed
        add_slices(language_run(root, "baseline", seed, 3.0 + noise), 2.0 + noise, 3.25)
        add_slices(language_run(root, "oelm-freeze", seed, 3.1), 2.5 + 2 * noise, 3.25)
    (comparison,) = analyse([root]).comparisons
    return comparison


def test_the_slices_of_a_part_account_for_the_whole_difference(tmp_path):
    gaps = slice_gaps(arms(tmp_path))
    assert [(gap.part, gap.name) for gap in gaps] == [
        ("whole", "whole"),
        ("recall", "hit"),
        ("recall", "rest"),
        ("frequency", "hit rare"),
        ("frequency", "rest common"),
        ("position", "1-8"),
        ("position", "9-16"),
    ]
    whole, hit, rest = gaps[:3]
    assert (hit.share, rest.share) == (0.2, 0.8)
    assert hit.difference.mean == pytest.approx(0.51)  # 0.50, 0.51, 0.52
    assert hit.difference.low < 0.5 < 0.52 < hit.difference.high
    assert whole.difference.mean == pytest.approx(0.2 * 0.51)
    assert hit.reference_loss == pytest.approx(2.01)
    assert (hit.gap_share, rest.gap_share) == (pytest.approx(1), 0)
    for part in ("recall", "frequency", "position"):
        assert sum(gap.gap_share for gap in gaps if gap.part == part) == pytest.approx(1)
        assert sum(gap.share for gap in gaps if gap.part == part) == pytest.approx(1)


def test_a_difference_that_may_be_zero_is_not_divided_up(tmp_path):
    for seed, (own, reference) in enumerate(((2.1, 2.0), (2.0, 2.1), (2.05, 2.0))):
        add_slices(language_run(tmp_path, "baseline", seed, 3.0), reference, 3.0)
        add_slices(language_run(tmp_path, "oelm-freeze", seed, 3.0), own, 3.0)
    (comparison,) = analyse([tmp_path]).comparisons
    gaps = slice_gaps(comparison)
    assert gaps[0].difference.low < 0 < gaps[0].difference.high
    assert {gap.gap_share for gap in gaps} == {None}


def test_runs_without_slices_or_of_other_tokens_have_none(tmp_path):
    comparison = arms(tmp_path)
    assert slice_gaps(comparison, "test") == ()
    folder = comparison.pairs[1][0].path
    add_slices(folder, 2.5, 3.25, tokens=2000)
    assert slice_gaps(analyse([tmp_path]).comparisons[0]) == ()
    last = json.loads((add_slices(folder, 2.5, 3.25) / "result.json").read_text(encoding="utf-8"))["last"]
    last["slices"]["recall"]["hit"]["loss"] = None  # it was not finite
    change(folder, "result.json", last=last)
    assert slice_gaps(analyse([tmp_path]).comparisons[0]) == ()
