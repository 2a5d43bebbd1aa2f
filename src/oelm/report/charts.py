"""The charts of a report as data: lines, intervals and grids. `drawing` draws them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

# Okabe and Ito's colours, which colour-blind readers can tell apart, dark enough for paper. Dashes and marks differ as
# well, so that the chart is readable in greyscale. The baseline has the first of each: black, solid, round.
COLOURS = ("#000000", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d1f")
DASHES = ("", "6 3", "2 2", "8 3 2 3", "10 4", "4 2 1 2", "1 3", "12 3 3 3")
MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, or single points when `line` is False, with an optional band or error bars from `low` to `high`.

    `x` has the values along each axis of the chart that the series can be drawn over. `style` is that of the method;
    several series of one method have its colour in different shades (from 0 to 1) and the dash and mark of `pattern`.
    """

    name: str
    style: int
    x: dict[str, list[float]]
    y: list[float]
    low: list[float] | None = None
    high: list[float] | None = None
    line: bool = True
    marks: bool = True
    faint: bool = False
    shade: float = 1.0
    pattern: int | None = None


@dataclass(frozen=True, kw_only=True)
class Lines:
    """Series over one axis or several, such as steps and seconds: one panel for each. `axes` maps names to labels."""

    axes: dict[str, str]
    y_label: str
    series: list[Series]
    title: str = ""
    log_x: bool = False
    log_y: bool = False


@dataclass(frozen=True, kw_only=True)
class IntervalRow:
    """One row of an interval chart. A hollow mark has no interval or no verdict; `cross` is an expected value.

    `reach` is a band behind this row alone.
    """

    label: str
    style: int
    value: float
    low: float | None = None
    high: float | None = None
    hollow: bool = False
    dots: list[float] = field(default_factory=list)
    cross: float | None = None
    reach: tuple[float, float] | None = None


@dataclass(frozen=True, kw_only=True)
class Intervals:
    """Values with intervals in rows, with an optional vertical line at `line`, and a band behind them."""

    x_label: str
    rows: list[IntervalRow]
    line: float | None = None
    band: tuple[float, float] | None = None
    line_label: str = ""
    cross_label: str = ""
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Shares from 0 to 1 in rows and columns, None for an empty field. `texts` are written into the fields."""

    rows: list[str]
    columns: list[str]
    values: list[list[float | None]]
    texts: list[list[str]]
    title: str = ""
    x_label: str = ""
    y_label: str = ""


def colour_of(style: int) -> int:
    """Return the number of a style's colour. The baseline's black is for no other; the dash and the mark differ."""
    return 0 if style == 0 else 1 + (style - 1) % (len(COLOURS) - 1)


Chart = Lines | Intervals | Grid


@dataclass(frozen=True)
class ChartFigure:
    """A figure of a report: one chart or several, with a title, a caption and a name for its file.

    Charts of one quantity, those whose value axis has the same label, share that axis.
    """

    name: str
    title: str
    caption: str
    charts: list[Chart]


class Styles:
    """The number of the style of each method, the same in all figures of a report. 0 is the baseline's alone."""

    def __init__(self, names: Iterable[str]) -> None:
        self._numbers = {name: number for number, name in enumerate(dict.fromkeys(["baseline", *names]))}

    def __getitem__(self, name: str) -> int:
        return self._numbers.setdefault(name, len(self._numbers))
