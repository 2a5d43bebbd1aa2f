"""Look up the texts of a report in its language. The texts are in words.en.yaml and words.zh.yaml beside this file."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib import resources

from ..base.yaml_text import parse_yaml
from ..errors import AnalysisError

LANGUAGES = ("en", "zh")


@dataclass(frozen=True, eq=False)
class Words:
    """The texts of one language. A call looks up a key and fills in its placeholders."""

    language: str
    texts: dict[str, str]

    def __call__(self, key: str, **values: object) -> str:
        text = self.texts[key]
        return text.format(**values) if values else text

    def all(self, *keys: str) -> list[str]:
        """Return the texts of several keys."""
        return [self(key) for key in keys]

    def in_a_row(self, sentences: Iterable[str]) -> str:
        """Return sentences as one text; Chinese ones follow each other without a space."""
        return ("" if self.language == "zh" else " ").join(sentences)


@cache
def words(language: str) -> Words:
    """Load the texts of a language, or raise AnalysisError when there are none."""
    if language not in LANGUAGES:
        raise AnalysisError(f"language {language!r}: use one of {', '.join(LANGUAGES)}")
    file = resources.files(__package__).joinpath(f"words.{language}.yaml")
    return Words(language, parse_yaml(file.read_text(encoding="utf-8")))
