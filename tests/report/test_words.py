"""The texts of a report: the same keys and placeholders in every language, each used by the code."""

import re
import string
from pathlib import Path

import pytest

import oelm
from oelm.analysis import AnalysisError
from oelm.report.words import words
from oelm.runs import published

ENGLISH, CHINESE = words("en").texts, words("zh").texts


def _placeholders(text):
    return {name for _, name, _, _ in string.Formatter().parse(text) if name}


def test_both_languages_have_the_same_keys_in_the_same_order():
    assert list(ENGLISH) == list(CHINESE)


def test_every_doubt_about_a_published_figure_has_its_chinese():
    figures = published.load()
    doubts = {text for experiment in figures.experiments.values() for text in experiment.doubts}
    assert set(figures.chinese) == doubts
    for english, chinese in figures.chinese.items():
        assert re.search(r"[\u4e00-\u9fff]", chinese), english
        digits = re.findall(r"\d[\d,.e-]*\d", english)
        assert all(number in chinese for number in digits), english


def test_every_text_has_the_same_placeholders_in_both_languages():
    for key in ENGLISH:
        assert ENGLISH[key].strip(), key
        assert CHINESE[key].strip(), key
        assert _placeholders(ENGLISH[key]) == _placeholders(CHINESE[key]), key


def test_only_formulas_are_the_same_in_both_languages():
    same = {key for key in ENGLISH if ENGLISH[key] == CHINESE[key]}
    assert same == {"rule_within", "rule_at_most", "rule_at_least", "rule_above", "rule_below"}


def test_the_code_uses_every_key_and_no_other():
    package = Path(oelm.__file__).parent
    files = [file for folder in ("report", "analysis", "cli") for file in (package / folder).iterdir()]
    code = "\n".join(file.read_text(encoding="utf-8") for file in files if file.suffix in (".py", ".j2"))
    looked_up = set(re.findall(r"""say\(\s*["']([\w-]+)["']""", code))
    assert looked_up - set(ENGLISH) == set()
    prefixes = tuple(set(re.findall(r"""f["'](\w+_)\{""", code)))  # such as say(f"kind_{kind}")
    quoted = set(re.findall(r"""["']([\w-]+)["']""", code))
    assert {key for key in ENGLISH if not key.startswith(prefixes)} - quoted == set()


def test_the_error_for_an_unknown_language_lists_the_known_ones():
    with pytest.raises(AnalysisError, match=r"'fr'.*en, zh"):
        words("fr")
