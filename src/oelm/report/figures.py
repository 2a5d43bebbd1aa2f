"""Charts drawn with matplotlib, as SVG and PNG: for paper, for greyscale, and for whoever sees no colours."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

from .charts import COLOURS, DASHES, MARKS, Chart, Figure, Grid, Intervals, Lines, Series

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
    family = ["DejaVu Sans"] if language == "en" else [cjk_font() or "DejaVu Sans", "DejaVu Sans"]
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
    with matplotlib.rc_context(style):
        for figure in figures:
            picture = _picture(figure)
            for ending in endings:
                options: dict[str, Any] = {"dpi": 160} if ending == "png" else {"metadata": {"Date": None}}
                path = folder / f"{figure.name}.{ending}"
                picture.savefig(path, **options)
                picture.set_layout_engine("none")  # laid out once; the second file keeps it
                written.append(path)
    return written


def width(figure: Figure) -> float:
    """How wide a figure is, in inches; the widest fill a page."""
    return FULL_WIDTH if _columns(figure) > 1 else 5.2


def _columns(figure: Figure) -> int:
    panels = sum(len(_panels(chart)) for chart in figure.charts)
    return min(panels, 3 if isinstance(figure.charts[0], Grid) else 2)


def _picture(figure: Figure) -> Any:
    panels = [panel for chart in figure.charts for panel in _panels(chart)]
    columns = _columns(figure)
    rows = -(-len(panels) // columns)
    named = isinstance(figure.charts[0], Lines)
    height = max(_height(chart) for chart in figure.charts)
    size = (width(figure), height * rows + (0.45 if named else 0.1))
    picture = import_module("matplotlib.figure").Figure(figsize=size, layout="constrained")
    axes = picture.subplots(rows, columns, squeeze=False)
    flat = [place for line in axes for place in line]
    for place, (chart, axis) in zip(flat, panels, strict=False):
        if isinstance(chart, Lines):
            _lines(place, chart, axis)
        elif isinstance(chart, Intervals):
            _intervals(place, chart)
        else:
            _grid(place, chart)
    for place in flat[len(panels) :]:
        place.set_visible(False)
    if named:
        handles, labels = flat[0].get_legend_handles_labels()
        longest = max(map(len, labels), default=1)
        room = max(1, int(width(figure) * 13 / (longest + 5)))  # letters of 8 points that fit side by side
        picture.legend(handles, labels, loc="outside lower center", ncols=min(4, room), fontsize=8)
    return picture


def _panels(chart: Chart) -> list[tuple[Chart, str]]:
    """A chart with several axes is drawn once for each that its series have."""
    if not isinstance(chart, Lines):
        return [(chart, "")]
    shown = [axis for axis in chart.axes if any(axis in series.x for series in chart.series)]
    return [(chart, axis) for axis in shown]


def _height(chart: Chart) -> float:
    if isinstance(chart, Intervals):
        return 0.9 + 0.3 * len(chart.rows)
    if isinstance(chart, Grid):
        return 0.9 + min(3.6, 0.24 * max(len(chart.rows), 4))
    return 2.7


def _lines(place: Any, chart: Lines, axis: str) -> None:
    for series in chart.series:
        if axis in series.x:
            _series(place, series, series.x[axis])
    place.set_xlabel(chart.axes[axis])
    place.set_ylabel(chart.y_label)
    if chart.title:
        place.set_title(chart.title, fontsize=9, loc="left")
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
    options = {"color": colour, "label": series.name, "linewidth": 1.4, "markersize": 4.5}
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
    count = len(chart.rows)
    for index, row in enumerate(chart.rows):
        y = count - 1 - index
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
    place.set_yticks(range(count), [row.label for row in reversed(chart.rows)])
    place.set_ylim(-0.6, count - 0.4)
    place.set_xlabel(chart.x_label)
    place.grid(axis="y", visible=False)
    place.tick_params(axis="y", length=0, labelcolor=_INK)
    if chart.line_label or (chart.cross_label and any(row.cross is not None for row in chart.rows)):
        place.legend(fontsize=8, loc="best")


def _grid(place: Any, chart: Grid) -> None:
    numpy = import_module("numpy")
    values = numpy.array(
        [[numpy.nan if value is None else value for value in row] for row in chart.values], dtype=float
    )
    place.imshow(values, cmap="Greys", vmin=-0.08, vmax=1.15, aspect="auto")
    for edge in range(1, len(chart.rows)):
        place.axhline(edge - 0.5, color="white", linewidth=1.2)
    for edge in range(1, len(chart.columns)):
        place.axvline(edge - 0.5, color="white", linewidth=1.2)
    for i, row in enumerate(chart.texts):
        for j, text in enumerate(row):
            value = chart.values[i][j]
            dark = value is not None and value > 0.6
            place.text(j, i, text, ha="center", va="center", fontsize=7.5, color="white" if dark else _INK)
    turned = {"rotation": 35, "ha": "right"} if max(map(len, chart.columns)) > 5 else {}
    place.set_xticks(range(len(chart.columns)), chart.columns, fontsize=7.5, **turned)
    place.set_yticks(range(len(chart.rows)), chart.rows, fontsize=7.5)
    place.set_xlabel(chart.x_label, fontsize=8)
    place.set_ylabel(chart.y_label, fontsize=8)
    place.set_title(chart.title, fontsize=8.5, loc="left")
    place.grid(visible=False)
    for spine in place.spines.values():
        spine.set_visible(False)


def _style(number: int) -> tuple[str, Any, str]:
    """Colour, dash and mark of a style; past the colours the dashes move on, so that no two are the same."""
    dash = DASHES[(number + number // len(COLOURS)) % len(DASHES)]
    line: Any = (0, [float(part) / 1.4 for part in dash.split()]) if dash else "-"
    return COLOURS[number % len(COLOURS)], line, MARKS[(number + number // len(COLOURS)) % len(MARKS)]
