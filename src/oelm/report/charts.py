"""The pictures as data: lines, intervals and grids. The page's script and matplotlib draw the same ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

# Okabe and Ito's colours, which colour-blind people tell apart, dark enough for paper; then dashes and marks, which
# carry the difference where there is no colour. The reference is black.
COLOURS = ("#000000", "#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D1F")
DASHES = ("", "6 3", "2 2", "8 3 2 3", "10 4", "4 2 1 2", "1 3", "12 3 3 3")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True)
class Series:
    """One line or cloud: a name, its style's number, values along each axis, and a band or bars around them."""

    name: str
    style: int
    x: dict[str, list[float]]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    line: bool = True
    marks: bool = True
    faint: bool = False


@dataclass(frozen=True)
class Lines:
    """Values over one axis or several: steps, time, rates. The first axis is the one that is shown first."""

    axes: dict[str, str]
    y_label: str
    series: list[Series]
    title: str = ""
    log_x: bool = False
    log_y: bool = False
    can_log: bool = True
    percent: bool = False
    kind: str = "lines"


@dataclass(frozen=True)
class Row:
    """One line of an interval chart. `hollow` is a value without an interval or a verdict."""

    label: str
    style: int
    value: float
    low: float | None = None
    high: float | None = None
    hollow: bool = False
    dots: list[float] = field(default_factory=list)
    cross: float | None = None
    text: str = ""


@dataclass(frozen=True)
class Intervals:
    """Values with intervals, one below the other, around a vertical line."""

    x_label: str
    rows: list[Row]
    line: float | None = None
    line_label: str = ""
    cross_label: str = ""
    title: str = ""
    kind: str = "intervals"


@dataclass(frozen=True)
class Grid:
    """Shares from 0 to 1 in rows and columns; none is an empty place. `texts` stand in the fields."""

    rows: list[str]
    columns: list[str]
    values: list[list[float | None]]
    texts: list[list[str]]
    title: str = ""
    x_label: str = ""
    y_label: str = ""
    kind: str = "grid"


Chart = Lines | Intervals | Grid


@dataclass(frozen=True)
class Figure:
    """A numbered picture: one chart or several side by side, with a title and a caption."""

    name: str
    title: str
    caption: str
    charts: list[Chart]


class Styles:
    """A style's number for every name, the same in all pictures of a report; the baseline's is the first."""

    def __init__(self, names: Iterable[str]) -> None:
        ordered = sorted(dict.fromkeys(names), key=lambda name: name != "baseline")
        self._numbers = {name: number for number, name in enumerate(ordered)}

    def __getitem__(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))


def as_data(chart: Chart) -> dict[str, Any]:
    """A chart for the page's script: plain JSON, numbers to six digits."""
    rounded = _round(asdict(chart))
    assert isinstance(rounded, dict)
    return rounded


def _round(content: Any) -> Any:
    if isinstance(content, float):
        return float(f"{content:.6g}")
    if isinstance(content, dict):
        return {key: _round(value) for key, value in content.items()}
    if isinstance(content, list | tuple):
        return [_round(value) for value in content]
    return content
