"""YAML without surprises: no number in another base, no alias without an end, no text that fills the memory."""

from datetime import date

import pytest

from oelm.base.yaml_text import parse_yaml


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("a: 10", {"a": 10}),
        ("a: 0", {"a": 0}),
        ("a: 0o17", {"a": "0o17"}),
        ("a: 0x1F", {"a": 31}),
        ("a: -3.5e-4", {"a": -3.5e-4}),
        ('a: "010"', {"a": "010"}),
        ("a: 2026-11-19", {"a": date(2026, 11, 19)}),
        ("a: &x {k: 1}\nb: {<<: *x, m: 2}", {"a": {"k": 1}, "b": {"k": 1, "m": 2}}),
    ],
)
def test_what_people_write_is_read_as_they_mean_it(text, content):
    assert parse_yaml(text) == content


@pytest.mark.parametrize("number", ["010", "-007", "1:30", "190:20:30", "1:30.5", "0_7"])
def test_a_number_in_another_base_is_refused(number):
    with pytest.raises(ValueError, match=rf"line 2: {number} is a number in another base .*in quotes"):
        parse_yaml(f"a: 1\nb: {number}")


def test_an_alias_within_what_it_names_is_refused():
    for text in ("a: &a [*a]", "a: &a {b: {c: *a}}", "&a [1, *a]"):
        with pytest.raises(ValueError, match="has no end"):
            parse_yaml(text)


def test_aliases_that_stand_for_too_much_are_refused_at_once():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 40)]
    with pytest.raises(ValueError, match="more than 100,000 values"):
        parse_yaml("\n".join(lines))
    assert parse_yaml("\n".join(lines[:3]))["a2"][9][9] == ["x"] * 10


def test_merges_that_stand_for_too_much_are_refused_at_once():
    lines = ["a0: &a0 {k: 1}"]
    lines += [f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 40)]
    with pytest.raises(ValueError, match="more than 100,000 values"):
        parse_yaml("\n".join(lines))
    assert parse_yaml("\n".join(lines[:3]))["a2"] == {"k": 1}
    with pytest.raises(ValueError, match="has no end"):
        parse_yaml("a: &a {<<: *a, b: 1}")
