"""Draw the figures of a report with matplotlib, once for Markdown, the page and the PDF: SVG, and PNG for slides.

Each style has a colour, a dash and a mark, so that the figures work on paper, in greyscale and without colour vision.
"""

from __future__ import annotations

import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from typing import Any

from matplotlib import rc_context
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.font_manager import findSystemFonts, fontManager
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from rich.cells import cell_len

from .charts import COLOURS, DASHES, MARKS, Chart, ChartFigure, Grid, IntervalRow, Intervals, Lines, Series, colour_of
from .svg import INK, MUTED, PANEL, PAPER, RULE, Notes, finish, printable

# Fonts with Chinese characters, in order of preference.
CJK_FONTS = (
    "Noto Sans CJK SC",
    "Noto Sans SC",
    "Source Han Sans SC",
    "WenQuanYi Zen Hei",
    "Microsoft YaHei",
    "PingFang SC",
)
# Inches. A figure is as wide as a page of the PDF, or so narrow that two fit beside each other, and one on a phone,
# when it has one panel with short labels.
FULL_WIDTH = 7.2
_HALF_WIDTH = 4.2
# Labels: characters in a line, most lines, and inches from one line to the next.
_LETTERS, _LINES, _LEADING = 32, 4, 0.16
# Characters in a line of the label beside a row of an interval chart that takes the whole width.
_BESIDE = 44
# A chart takes the whole width when a label has more characters than this. A label beside a row is broken between
# words into lines of that length, if a few are enough.
_SHORT, _FEW = 20, 3
# Inches that a field of a grid needs for its text, and that a character of a label beside it takes.
_FIELD, _LETTER = 0.28, 0.068
_STYLE: dict[Any, Any] = {
    "font.size": 9,
    # Text stays text: it can be searched and read aloud, and the page shows it in its own font.
    "svg.fonttype": "none",
    # Names of methods and classes may contain dollar signs, which would start a formula.
    "text.parse_math": False,
    "text.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "axes.unicode_minus": True,
}


@dataclass(frozen=True)
class Drawing:
    """One figure as SVG text, and as PNG if that was asked for."""

    svg: str
    png: bytes | None


def cjk_font() -> str | None:
    """Return the name of a font with Chinese characters that matplotlib can use, or None."""
    return _known_cjk_font() or _new_cjk_font()


def _known_cjk_font() -> str | None:
    names = {font.name for font in fontManager.ttflist}
    return next((name for name in CJK_FONTS if name in names), None)


def _new_cjk_font() -> str | None:
    """Add the fonts that matplotlib does not know: it lists the system's at its first use, and keeps that list."""
    for path in set(findSystemFonts()) - {font.fname for font in fontManager.ttflist}:
        try:
            fontManager.addfont(path)
        except (OSError, RuntimeError):  # It is no font that matplotlib can read, which is why it is not in the list.
            continue
    return _known_cjk_font()


def draw(figures: Sequence[ChartFigure], png: bool = False) -> dict[str, Drawing]:
    """Draw the figures, and return the drawings by the figures' names. The same figures give the same bytes."""
    drawings = {}
    for figure in figures:
        with drawing_style(figure.name):
            drawings[figure.name] = _draw_one(figure, png)
    return drawings


@contextmanager
def drawing_style(name: str) -> Iterator[None]:
    """Draw in the block in the style of all figures; `name` is the figure's.

    Latin letters always come from DejaVu Sans. It is wider than most fonts, so that a label that fits in it also fits
    in the font of the reader of an SVG. Labels may be Chinese in a report of any language.
    """
    fonts = [font for font in ("DejaVu Sans", cjk_font()) if font is not None]
    with warnings.catch_warnings():
        # A character that no font has is drawn as a box in the PNG; the SVG holds it as text.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        # The salt makes the ids in the SVG the same each time, and different between the figures of a page.
        with rc_context(_STYLE | {"font.family": fonts, "svg.hashsalt": name}):
            yield


def _draw_one(figure: ChartFigure, png: bool) -> Drawing:
    canvas, notes = _lay_out(figure)
    vector, raster = BytesIO(), BytesIO()
    # Laying out makes the axes wider, which may add a number at their end; saving lays out again, with room for it.
    canvas.draw_without_rendering()
    canvas.savefig(vector, format="svg", metadata={"Date": None})
    if png:
        canvas.set_layout_engine("none")  # The layout was computed for the SVG and stays the same.
        canvas.savefig(raster, format="png", dpi=160)
    return Drawing(finish(vector.getvalue(), figure.title, figure.caption, notes), raster.getvalue() if png else None)


def width(figure: ChartFigure) -> float:
    """Return how wide a figure is drawn, in inches; one without charts is a picture of its own, of the whole width."""
    wide = not figure.charts or _columns(figure) > 1 or any(_is_crowded(chart) for chart in figure.charts)
    return FULL_WIDTH if wide else _HALF_WIDTH


def height(figure: ChartFigure) -> float:
    """Return how high a figure is drawn, in inches: as high as its content needs, even beyond a page."""
    return sum(_row_heights(figure)) + _legend(figure)[2]


def is_wide(figure: ChartFigure) -> bool:
    """Return True when a figure needs the whole width, False when two of its kind fit beside each other."""
    return width(figure) > _HALF_WIDTH


def _row_heights(figure: ChartFigure) -> list[float]:
    """Return the height of each row of a figure's panels: that of the highest panel in it."""
    columns = _columns(figure)
    heights = [_height(chart, columns, _beside(figure)) for chart in figure.charts for _ in _panels(chart)]
    return [max(heights[start : start + columns]) for start in range(0, len(heights), columns)]


def _is_crowded(chart: Chart) -> bool:
    """Return True when a chart has a wide grid, or long names beside its rows or in its legend."""
    if isinstance(chart, Grid):
        return _grid_width(chart) > _HALF_WIDTH
    if isinstance(chart, Lines):
        return any(cell_len(series.name) > _SHORT for series in chart.series)
    return any(
        len(textwrap.wrap(printable(row.label), _SHORT, break_on_hyphens=False, break_long_words=False)) > _FEW
        or any(cell_len(word) > _SHORT for word in row.label.split())
        for row in chart.rows
    )


def _beside(figure: ChartFigure) -> int:
    """Return how many characters a line of the label beside a row has in this figure."""
    return _BESIDE if is_wide(figure) else _SHORT


def _columns(figure: ChartFigure) -> int:
    """Return how many panels are beside each other; rows of intervals are below each other, to be compared."""
    if any(isinstance(chart, Intervals) for chart in figure.charts):
        return 1
    panels = sum(len(_panels(chart)) for chart in figure.charts)
    widest = max((_grid_width(chart) for chart in figure.charts if isinstance(chart, Grid)), default=FULL_WIDTH / 3)
    return max(1, min(panels, 3, int(FULL_WIDTH / widest)))


def _grid_width(chart: Grid) -> float:
    return _label_width(chart) + _FIELD * len(chart.columns)


def _label_width(chart: Grid) -> float:
    """Return the inches that the labels of a grid's rows take."""
    return 0.4 + _LETTER * max(cell_len(_cut(name)) for name in chart.rows)


def _lay_out(figure: ChartFigure) -> tuple[Figure, Notes]:
    """Return the figure as a matplotlib figure, and the notes on its artists."""
    panels = [panel for chart in figure.charts for panel in _panels(chart)]
    columns, notes, heights = _columns(figure), Notes(), _row_heights(figure)
    canvas = Figure(figsize=(width(figure), height(figure)), layout="constrained")
    grid = canvas.subplots(len(heights), columns, squeeze=False, height_ratios=heights)
    all_axes = [axes for line in grid for axes in line]
    _share(all_axes, [chart for chart, _ in panels])
    for axes, (chart, axis) in zip(all_axes, panels, strict=False):
        if isinstance(chart, Lines):
            _draw_lines(axes, chart, axis, notes)
        elif isinstance(chart, Intervals):
            _draw_intervals(axes, chart, _beside(figure), notes)
        else:
            _draw_grid(axes, chart, width(figure) / columns)
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    _label_once(all_axes, [chart for chart, _ in panels], columns)
    _draw_legend(canvas, figure, all_axes[: len(panels)], notes)
    return canvas, notes


def _share(all_axes: Sequence[Axes], charts: Sequence[Chart]) -> None:
    """Give panels of one quantity the same scale."""
    first: dict[str, Axes] = {}
    for axes, chart in zip(all_axes, charts, strict=False):
        if isinstance(chart, Lines) and axes is not first.setdefault(chart.y_label, axes):
            axes.sharey(first[chart.y_label])
        if isinstance(chart, Intervals) and axes is not first.setdefault(chart.x_label, axes):
            axes.sharex(first[chart.x_label])


def _label_once(all_axes: Sequence[Axes], charts: Sequence[Chart], columns: int) -> None:
    """Remove the label and the numbers of a shared axis where the panel beside it, or below it, has them."""
    for index, (axes, chart) in enumerate(zip(all_axes, charts, strict=False)):
        before = charts[index - 1] if index % columns else None
        if isinstance(chart, Lines) and isinstance(before, Lines) and before.y_label == chart.y_label:
            axes.set_ylabel("")
            axes.tick_params(axis="y", which="both", labelleft=False)
        after = charts[index + 1] if index + 1 < len(charts) else None
        if isinstance(chart, Intervals) and isinstance(after, Intervals) and after.x_label == chart.x_label:
            axes.set_xlabel("")
            axes.tick_params(axis="x", labelbottom=False)


def _draw_legend(canvas: Figure, figure: ChartFigure, all_axes: Sequence[Axes], notes: Notes) -> None:
    """Draw one legend below all panels. On the page, a click on a name hides its lines."""
    names, columns, _ = _legend(figure)
    handles: dict[str, Any] = {}
    for axes in all_axes if names else ():
        handles = {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)} | handles
    shown = [name for name in names if name in handles]
    if shown:
        legend = canvas.legend(
            [handles[name] for name in shown], shown, loc="outside lower center", ncols=columns, fontsize=8
        )
        for text in legend.get_texts():
            notes.add(text, legend=text.get_text())


def _legend(figure: ChartFigure) -> tuple[list[str], int, float]:
    """Return the names in a figure's legend, its number of columns, and its height in inches."""
    all_series = [series for chart in figure.charts if isinstance(chart, Lines) for series in chart.series]
    names = list(dict.fromkeys(_wrapped(series.name) for series in all_series))
    if not names:
        return [], 1, 0.1
    longest = max(cell_len(line) for name in names for line in name.split("\n"))
    columns = min(4, max(1, int(width(figure) * 13 / (longest + 5))))  # 13 characters of 8 points fit in an inch
    each = -(-len(names) // columns)
    lines = max(sum(_line_count(name) for name in names[start : start + each]) for start in range(0, len(names), each))
    return names, columns, max(0.45, 0.1 + _LEADING * lines + 0.03 * each)


def _wrapped(text: str, letters: int = _LETTERS) -> str:
    """Return a name in lines that fit beside a chart, shortened when there are too many of them."""
    name = printable(text)
    too_long = any(len(word) > letters for word in name.split())
    return "\n".join(textwrap.wrap(name, letters, max_lines=_LINES, placeholder=" …", break_on_hyphens=too_long))


def _cut(text: str, letters: int = 24) -> str:
    """Return a name in one line, shortened when it is too long."""
    name = printable(text)
    return name if len(name) <= letters else f"{name[: letters - 1]}…"


def _line_count(label: str) -> int:
    return label.count("\n") + 1


def _panels(chart: Chart) -> list[tuple[Chart, str]]:
    """Return the chart once for each axis that any of its series has values for."""
    if not isinstance(chart, Lines):
        return [(chart, "")]
    shown = [axis for axis in chart.axes if any(axis in series.x for series in chart.series)]
    return [(chart, axis) for axis in shown]


def _height(chart: Chart, columns: int, beside: int) -> float:
    title = _LEADING * (_line_count(_wrapped(chart.title, 20 if isinstance(chart, Grid) else _LETTERS)) - 1)
    if isinstance(chart, Intervals):
        return (0.5 if chart.title else 0.75) + 0.3 * sum(_row_height(row, beside) for row in chart.rows) + title
    if isinstance(chart, Grid):
        count, longest = len(chart.rows), max(cell_len(_cut(name)) for name in chart.columns)
        below = 0.6 * _LETTER * max(0, longest - 8)  # The labels of the columns are slanted.
        return 0.9 + max(min(3.6, 0.24 * max(count, 4)), 0.13 * count) + below + title
    return (2.7 if columns < 3 else 2.3) + title


def _row_height(row: IntervalRow, beside: int) -> float:
    """Return the height of a row of an interval chart, as a multiple of one with a label of one line."""
    return max(1.0, 0.2 + _LEADING / 0.3 * _line_count(_wrapped(row.label, beside)))


def _draw_lines(axes: Axes, chart: Lines, axis: str, notes: Notes) -> None:
    for series in chart.series:
        if axis in series.x:
            _draw_series(axes, series, series.x[axis], notes)
    axes.set_xlabel(chart.axes[axis])
    axes.set_ylabel(chart.y_label)
    if chart.title:
        axes.set_title(_wrapped(chart.title), fontsize=9, loc="left")
    plain_numbers = FuncFormatter(lambda value, _: f"{value:g}")
    if chart.log_x:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(plain_numbers)
        ticks = sorted({x for series in chart.series for x in series.x.get(axis, [])})
        if len(ticks) <= 8:
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    if chart.log_y:
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 5.0, 7.0)))
        axes.yaxis.set_major_formatter(plain_numbers)
        axes.yaxis.set_minor_formatter(NullFormatter())


def _draw_series(axes: Axes, series: Series, x: list[float], notes: Notes) -> None:
    colour, dash, mark = _style(series.style)
    if series.pattern is not None:
        _, dash, mark = _style(series.pattern)
    name = _wrapped(series.name)
    options: dict[str, Any] = {"color": colour, "label": name, "linewidth": 1.4, "markersize": 4.5}
    options |= {"alpha": series.shade} if series.shade < 1 else {}
    if series.faint:
        options |= {"alpha": 0.55, "linewidth": 1.0}
    low, high = series.low or series.y, series.high or series.y
    titles = [
        f"{series.name} ({_number(at)}): {_value(y, down, up)}"
        for at, y, down, up in zip(x, series.y, low, high, strict=True)
    ]
    parts: list[Artist]
    if series.line:
        (line,) = axes.plot(x, series.y, linestyle=dash, marker=mark if series.marks else None, **options)
        parts = [line]
        if series.low is not None:
            parts.append(axes.fill_between(x, low, high, color=colour, alpha=0.14, linewidth=0))
    else:
        down = [y - a for y, a in zip(series.y, low, strict=True)]
        up = [b - y for y, b in zip(series.y, high, strict=True)]
        bars = axes.errorbar(x, series.y, yerr=[down, up], fmt=mark, capsize=3, **(options | {"markersize": 6}))
        parts = [bars.lines[0], *bars.lines[1], *bars.lines[2]]
    notes.add(parts[0], series.name, titles if series.marks else (), series=name)
    for part in parts[1:]:
        notes.add(part, series=name)


def _draw_intervals(axes: Axes, chart: Intervals, beside: int, notes: Notes) -> None:
    heights = [_row_height(row, beside) for row in chart.rows]
    total = sum(heights)
    top, centres = total - 0.5, []
    for index, (row, height_of_row) in enumerate(zip(chart.rows, heights, strict=True)):
        y = top - height_of_row / 2
        top -= height_of_row
        centres.append(y)
        colour, _, mark = _style(row.style)
        title = f"{row.label}: {_value(row.value, row.low, row.high)}"
        if row.reach is not None:
            low, high = row.reach
            axes.barh(y, high - low, height_of_row, low, color=RULE, alpha=0.7, linewidth=0, zorder=0)
        if row.low is not None and row.high is not None:
            (bar,) = axes.plot([row.low, row.high], [y, y], color=colour, linewidth=1.8, solid_capstyle="butt")
            notes.add(bar, title)
            for end in (row.low, row.high):
                axes.plot([end, end], [y - 0.13, y + 0.13], color=colour, linewidth=1.8)
        if row.dots:
            axes.plot(row.dots, [y - 0.27] * len(row.dots), ".", color=colour, markersize=3.5, alpha=0.75)
        fill = PAPER if row.hollow else colour
        style: dict[str, Any] = {"markerfacecolor": fill, "markersize": 6.5, "markeredgewidth": 1.4}
        (point,) = axes.plot([row.value], [y], mark, color=colour, **style)
        notes.add(point, title)
        if row.cross is not None:
            label = chart.cross_label if index == 0 else None
            (cross,) = axes.plot([row.cross], [y], "x", color=INK, markersize=6, markeredgewidth=1.4, label=label)
            notes.add(cross, f"{chart.cross_label}: {_number(row.cross)}")
    if chart.band is not None:
        axes.axvspan(*chart.band, color=RULE, alpha=0.55, linewidth=0, zorder=0)
    if chart.title:
        axes.set_title(_wrapped(chart.title), fontsize=9, loc="left")
    if chart.line is not None:
        axes.axvline(chart.line, color=INK, linewidth=1, linestyle="--", label=chart.line_label or None, zorder=1)
    axes.set_yticks(centres, [_wrapped(row.label, beside) for row in chart.rows])
    axes.set_ylim(-0.6, total - 0.4)
    axes.set_xlabel(chart.x_label)
    axes.grid(axis="y", visible=False)
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    if chart.line_label or (chart.cross_label and any(row.cross is not None for row in chart.rows)):
        axes.legend(fontsize=8, loc="best")


def _draw_grid(axes: Axes, chart: Grid, inches: float) -> None:
    """Draw rows and columns of shares as shades of ink. When the fields are narrow, they have no text."""
    rows, columns = len(chart.rows), len(chart.columns)
    room = inches - _label_width(chart)
    field = room / columns
    axes.set(xlim=(-0.5, columns - 0.5), ylim=(rows - 0.5, -0.5), facecolor=PANEL)
    for i, row in enumerate(chart.values):
        for j, value in enumerate(row):
            shade = value or 0.0
            if shade >= 0.005:  # An empty field needs no rectangle; a large confusion matrix has thousands of them.
                axes.add_patch(Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=INK, alpha=0.85 * shade, linewidth=0))
            if field >= _FIELD:
                colour = PAPER if shade > 0.5 else INK
                axes.text(j, i, chart.texts[i][j], ha="center", va="center", fontsize=7.5, color=colour)
    for edge in range(1, rows):
        axes.axhline(edge - 0.5, color=PAPER, linewidth=1.2)
    for edge in range(1, columns):
        axes.axvline(edge - 0.5, color=PAPER, linewidth=1.2)
    slant: dict[str, Any] = {"rotation": 35, "ha": "right"} if max(map(cell_len, chart.columns)) > 5 else {}
    if field < _FIELD:
        slant = {"rotation": 90}
    letters = min(7.5, 72 * field)
    axes.set_xticks(range(columns), [_cut(name) for name in chart.columns], fontsize=letters, **slant)
    axes.set_yticks(range(rows), [_cut(name) for name in chart.rows], fontsize=letters)
    axes.set_xlabel(chart.x_label, fontsize=8)
    axes.set_ylabel(chart.y_label, fontsize=8)
    axes.set_title(_wrapped(chart.title, max(16, int(room / _LETTER))), fontsize=8.5, loc="left")
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def _style(number: int) -> tuple[str, Any, str]:
    """Return the colour, dash and mark of a style. There is one more of the latter, so no two styles are alike."""
    dash = DASHES[number % len(DASHES)]
    line: Any = (0, [float(part) / 1.4 for part in dash.split()]) if dash else "-"
    return COLOURS[colour_of(number)], line, MARKS[number % len(MARKS)]


def _value(value: float, low: float | None, high: float | None) -> str:
    """Return a value with its interval, if it has one, for a tooltip."""
    if low is None or high is None or low == high:
        return _number(value)
    return f"{_number(value)} ({_number(low)} – {_number(high)})"


def _number(value: float) -> str:
    return f"{value:.4g}" if abs(value) < 1000 else f"{value:,.0f}"
