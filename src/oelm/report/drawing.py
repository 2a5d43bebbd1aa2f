"""Charts drawn with matplotlib, as SVG and PNG: for paper, for greyscale, and for whoever sees no colours."""

from __future__ import annotations

import textwrap
import warnings
from importlib import import_module
from io import BytesIO
from pathlib import Path
from typing import Any

from ..base.files import write_bytes
from .charts import COLOURS, DASHES, MARKS, Chart, Figure, Grid, Intervals, Lines, Row, Series

# Fonts that hold Chinese, the first that is there; and the one that matplotlib brings along.
CJK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "Microsoft YaHei",
    "PingFang SC",
)
FULL_WIDTH = 7.2
_HALF_WIDTH = 5.2
# Letters in a line of a label, lines of a label, and inches from one line to the next.
_LETTERS, _LINES, _LEADING = 32, 4, 0.16
_BESIDE = 44  # beside the rows of an interval chart, which is wide where they are long
# A chart with longer labels than this takes the whole width.
_SHORT = 20
# Inches that a field of a grid needs for its text, and that a letter of a label beside it takes.
_FIELD, _LETTER = 0.28, 0.068
_INK, _MUTED, _GRID = "#1a1a1a", "#5c5c5c", "#d9d9d9"


def available() -> bool:
    try:
        import_module("matplotlib")
    except ImportError:
        return False
    return True


def cjk_font() -> str | None:
    """The name of a font with Chinese that matplotlib finds."""
    manager = import_module("matplotlib.font_manager").fontManager
    names = {font.name for font in manager.ttflist}
    return next((name for name in CJK_FONTS if name in names), None)


def draw(
    figures: list[Figure], folder: Path, language: str = "en", endings: tuple[str, ...] = ("png", "svg")
) -> list[Path]:
    """Write every figure, as SVG and PNG unless told otherwise; the files."""
    matplotlib = import_module("matplotlib")
    folder.mkdir(parents=True, exist_ok=True)
    # Names of methods and classes may be Chinese in any language.
    family = [name for name in ("DejaVu Sans", cjk_font()) if name is not None]
    family = family if language == "en" else family[::-1]
    style = {
        "font.family": family,
        "font.size": 9,
        "svg.hashsalt": "oelm",
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": _MUTED,
        "axes.labelcolor": _INK,
        "xtick.color": _MUTED,
        "ytick.color": _MUTED,
        "axes.grid": True,
        "axes.axisbelow": True,
        "grid.color": _GRID,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "axes.unicode_minus": True,
    }
    written = []
    with matplotlib.rc_context(style), warnings.catch_warnings():
        # A letter that no font here has becomes a box; the page and the tables hold the name.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        for figure in figures:
            picture = _picture(figure)
            for ending in endings:
                options: dict[str, Any] = {"dpi": 160} if ending == "png" else {"metadata": {"Date": None}}
                path = folder / f"{figure.name}.{ending}"
                drawn = BytesIO()
                picture.savefig(drawn, format=ending, **options)
                write_bytes(path, drawn.getvalue())
                picture.set_layout_engine("none")  # laid out once; the second file keeps it
                written.append(path)
    return written


def width(figure: Figure) -> float:
    """How wide a figure is, in inches; the widest fill a page."""
    wide = _columns(figure) > 1 or any(_crowded(chart) for chart in figure.charts)
    return FULL_WIDTH if wide else _HALF_WIDTH


def height(figure: Figure) -> float:
    """How high a figure is, in inches: it grows with what it shows, and may be higher than a page."""
    panels = sum(len(_panels(chart)) for chart in figure.charts)
    rows = -(-panels // _columns(figure))
    return max(_height(chart) for chart in figure.charts) * rows + _legend(figure)[2]


def _crowded(chart: Chart) -> bool:
    """Whether a chart has a wide grid, or long names beside its rows or in its legend."""
    if isinstance(chart, Grid):
        return _grid_width(chart) > _HALF_WIDTH
    names = [one.name for one in chart.series] if isinstance(chart, Lines) else [row.label for row in chart.rows]
    return any(len(name) > _SHORT for name in names)


def _columns(figure: Figure) -> int:
    panels = sum(len(_panels(chart)) for chart in figure.charts)
    widest = max((_grid_width(chart) for chart in figure.charts if isinstance(chart, Grid)), default=FULL_WIDTH / 2)
    return max(1, min(panels, 3, int(FULL_WIDTH / widest)))


def _grid_width(chart: Grid) -> float:
    return _beside(chart) + _FIELD * len(chart.columns)


def _beside(chart: Grid) -> float:
    """The inches that the labels of a grid's rows take."""
    return 0.4 + _LETTER * max(len(_cut(name)) for name in chart.rows)


def _picture(figure: Figure) -> Any:
    panels = [panel for chart in figure.charts for panel in _panels(chart)]
    columns = _columns(figure)
    rows = -(-len(panels) // columns)
    names, legend_columns, _ = _legend(figure)
    size = (width(figure), height(figure))
    picture = import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    axes = picture.subplots(rows, columns, squeeze=False)
    flat = [place for line in axes for place in line]
    for place, (chart, axis) in zip(flat, panels, strict=False):
        if isinstance(chart, Lines):
            _lines(place, chart, axis)
        elif isinstance(chart, Intervals):
            _intervals(place, chart)
        else:
            _grid(place, chart, width(figure) / columns)
    for place in flat[len(panels) :]:
        place.set_visible(False)
    if names:
        handles: dict[str, Any] = {}
        for place in flat[: len(panels)]:
            handles |= {label: handle for handle, label in zip(*place.get_legend_handles_labels(), strict=True)}
        shown = [name for name in names if name in handles]
        picture.legend(
            [handles[name] for name in shown], shown, loc="outside lower center", ncols=legend_columns, fontsize=8
        )
    return picture


def _legend(figure: Figure) -> tuple[list[str], int, float]:
    """The names below the lines of a figure, in how many columns they stand, and how high they are, in inches."""
    series = [series for chart in figure.charts if isinstance(chart, Lines) for series in chart.series]
    names = list(dict.fromkeys(_lined(one.name) for one in series))
    if not names:
        return [], 1, 0.1
    longest = max(len(line) for name in names for line in name.splitlines())
    columns = min(4, max(1, int(width(figure) * 13 / (longest + 5))))  # letters of 8 points that fit side by side
    each = -(-len(names) // columns)
    lines = max(sum(_lines_of(name) for name in names[start : start + each]) for start in range(0, len(names), each))
    return names, columns, max(0.45, 0.1 + _LEADING * lines + 0.03 * each)


def _lined(text: str, letters: int = _LETTERS) -> str:
    """A name in lines that fit beside a chart, shortened where even those are too many."""
    lines = textwrap.wrap(text, letters, max_lines=_LINES, placeholder=" …", break_on_hyphens=False)
    return _plain("\n".join(lines))


def _cut(text: str, letters: int = 24) -> str:
    """A name in one line."""
    return _plain(text if len(text) <= letters else f"{text[: letters - 1]}…")


def _plain(text: str) -> str:
    """What matplotlib shows letter by letter: between dollar signs it would read a formula."""
    return text.replace("$", r"\$")


def _lines_of(label: str) -> int:
    return label.count("\n") + 1


def _panels(chart: Chart) -> list[tuple[Chart, str]]:
    """A chart with several axes is drawn once for each that its series have."""
    if not isinstance(chart, Lines):
        return [(chart, "")]
    shown = [axis for axis in chart.axes if any(axis in series.x for series in chart.series)]
    return [(chart, axis) for axis in shown]


def _height(chart: Chart) -> float:
    title = _LEADING * (_lines_of(_lined(chart.title, 20 if isinstance(chart, Grid) else _LETTERS)) - 1)
    if isinstance(chart, Intervals):
        return 0.9 + 0.3 * (sum(_share(row) for row in chart.rows)) + title
    if isinstance(chart, Grid):
        count, longest = len(chart.rows), max(len(_cut(name)) for name in chart.columns)
        below = 0.6 * _LETTER * max(0, longest - 8)  # slanted
        return 0.9 + max(min(3.6, 0.24 * max(count, 4)), 0.13 * count) + below + title
    return 2.7 + title


def _share(row: Row) -> float:
    """How many rows of one line a row of an interval chart is high."""
    return max(1.0, 0.2 + _LEADING / 0.3 * _lines_of(_lined(row.label, _BESIDE)))


def _lines(place: Any, chart: Lines, axis: str) -> None:
    for series in chart.series:
        if axis in series.x:
            _series(place, series, series.x[axis])
    place.set_xlabel(chart.axes[axis])
    place.set_ylabel(chart.y_label)
    if chart.title:
        place.set_title(_lined(chart.title), fontsize=9, loc="left")
    if chart.log_x:
        place.set_xscale("log")
        ticks = sorted({x for series in chart.series for x in series.x.get(axis, [])})
        if len(ticks) <= 8:
            place.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            place.minorticks_off()
    if chart.log_y:
        place.set_yscale("log")
        ticker = import_module("matplotlib.ticker")
        place.yaxis.set_major_locator(ticker.LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        place.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        place.yaxis.set_minor_formatter(ticker.NullFormatter())


def _series(place: Any, series: Series, x: list[float]) -> None:
    colour, dash, mark = _style(series.style)
    options = {"color": colour, "label": _lined(series.name), "linewidth": 1.4, "markersize": 4.5}
    if series.faint:
        options |= {"alpha": 0.55, "linewidth": 1.0}
    if not series.line:
        low, high = series.low or series.y, series.high or series.y
        down = [y - a for y, a in zip(series.y, low, strict=True)]
        up = [b - y for y, b in zip(series.y, high, strict=True)]
        place.errorbar(x, series.y, yerr=[down, up], fmt=mark, capsize=3, **(options | {"markersize": 6}))
        return
    place.plot(x, series.y, linestyle=dash, marker=mark if series.marks else None, **options)
    if series.low is not None and series.high is not None:
        place.fill_between(x, series.low, series.high, color=colour, alpha=0.14, linewidth=0)


def _intervals(place: Any, chart: Intervals) -> None:
    top = sum(_share(row) for row in chart.rows) - 0.5
    heights: list[float] = []
    for index, row in enumerate(chart.rows):
        y = top - _share(row) / 2
        top -= _share(row)
        heights.append(y)
        colour, _, mark = _style(row.style)
        if row.low is not None and row.high is not None:
            place.plot([row.low, row.high], [y, y], color=colour, linewidth=1.8, solid_capstyle="butt")
            for end in (row.low, row.high):
                place.plot([end, end], [y - 0.13, y + 0.13], color=colour, linewidth=1.8)
        if row.dots:
            place.plot(row.dots, [y - 0.27] * len(row.dots), ".", color=colour, markersize=3.5, alpha=0.75)
        fill = "white" if row.hollow else colour
        place.plot([row.value], [y], mark, color=colour, markerfacecolor=fill, markersize=6.5, markeredgewidth=1.4)
        if row.cross is not None:
            label = chart.cross_label if index == 0 else None
            place.plot([row.cross], [y], "x", color=_INK, markersize=6, markeredgewidth=1.4, label=label)
    if chart.line is not None:
        place.axvline(chart.line, color=_INK, linewidth=1, linestyle="--", label=chart.line_label or None, zorder=1)
    place.set_yticks(heights, [_lined(row.label, _BESIDE) for row in chart.rows])
    place.set_ylim(-0.6, sum(_share(row) for row in chart.rows) - 0.4)
    place.set_xlabel(chart.x_label)
    place.grid(axis="y", visible=False)
    place.tick_params(axis="y", length=0, labelcolor=_INK)
    if chart.line_label or (chart.cross_label and any(row.cross is not None for row in chart.rows)):
        place.legend(fontsize=8, loc="best")


def _grid(place: Any, chart: Grid, inches: float) -> None:
    """Rows and columns of shares. Where the fields are narrow, their greys alone say what they hold."""
    numpy = import_module("numpy")
    values = numpy.array(
        [[numpy.nan if value is None else value for value in row] for row in chart.values], dtype=float
    )
    place.imshow(values, cmap="Greys", vmin=-0.08, vmax=1.15, aspect="auto")
    for edge in range(1, len(chart.rows)):
        place.axhline(edge - 0.5, color="white", linewidth=1.2)
    for edge in range(1, len(chart.columns)):
        place.axvline(edge - 0.5, color="white", linewidth=1.2)
    room = inches - _beside(chart)
    field = room / len(chart.columns)
    for i, row in enumerate(chart.texts if field >= _FIELD else []):
        for j, text in enumerate(row):
            value = chart.values[i][j]
            dark = value is not None and value > 0.6
            place.text(j, i, text, ha="center", va="center", fontsize=7.5, color="white" if dark else _INK)
    turned: dict[str, Any] = {"rotation": 35, "ha": "right"} if max(map(len, chart.columns)) > 5 else {}
    if field < _FIELD:
        turned = {"rotation": 90}
    letters = min(7.5, 72 * field)
    place.set_xticks(range(len(chart.columns)), [_cut(name) for name in chart.columns], fontsize=letters, **turned)
    place.set_yticks(range(len(chart.rows)), [_cut(name) for name in chart.rows], fontsize=letters)
    place.set_xlabel(chart.x_label, fontsize=8)
    place.set_ylabel(chart.y_label, fontsize=8)
    place.set_title(_lined(chart.title, max(16, int(room / _LETTER))), fontsize=8.5, loc="left")
    place.grid(visible=False)
    for spine in place.spines.values():
        spine.set_visible(False)


def _style(number: int) -> tuple[str, Any, str]:
    """Colour, dash and mark of a style; past the colours the dashes move on, so that no two are the same."""
    dash = DASHES[(number + number // len(COLOURS)) % len(DASHES)]
    line: Any = (0, [float(part) / 1.4 for part in dash.split()]) if dash else "-"
    return COLOURS[number % len(COLOURS)], line, MARKS[(number + number // len(COLOURS)) % len(MARKS)]
