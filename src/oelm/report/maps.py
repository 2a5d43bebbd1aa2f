"""Draw the attention maps of all heads as one picture: a row for each layer, a column for each head."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO

import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ..runs.looks import LayerMap
from .charts import COLOURS, ChartFigure
from .drawing import FULL_WIDTH, Drawing, drawing_style
from .svg import Notes, finish, printable

# Pixels of the smaller side of a map at most and at least, and of all maps together.
_LARGEST, _SMALLEST, _PIXELS = 160, 24, 12_000_000
# Pixels between two maps, inches that a row's label takes, and inches of a map in a wide picture.
_GAP, _LABEL, _INCH = 4, 0.9, 0.3
# Letters of a name above the maps that fit into an inch.
_LETTERS = 12

Pixels = npt.NDArray[np.float32]


@dataclass(frozen=True)
class MapsFigure(ChartFigure):
    """The maps of one model or of several, side by side.

    `names` stand above them, `labels` beside their rows, and `head` below their columns.
    """

    names: tuple[str, ...] = ()
    labels: tuple[tuple[str, ...], ...] = ()
    head: str = ""
    maps: tuple[tuple[LayerMap, ...], ...] = ()


def draw_maps(figure: MapsFigure, png: bool = False) -> Drawing:
    """Draw the maps as SVG, and as PNG if asked for: a map's rows are queries, its columns keys, dark where all looks.

    The same maps give the same bytes.
    """
    with drawing_style(figure.name):
        canvas = _lay_out(figure)
        vector, raster = BytesIO(), BytesIO()
        canvas.savefig(vector, format="svg", metadata={"Date": None})
        if png:
            canvas.savefig(raster, format="png", dpi=160)
    svg = finish(vector.getvalue(), figure.title, figure.caption, Notes())
    return Drawing(svg, raster.getvalue() if png else None)


def _lay_out(figure: MapsFigure) -> Figure:
    columns = [max(len(own.weights) for own in maps) for maps in figure.maps]
    rows = max(len(maps) for maps in figure.maps)
    total = sum(columns)
    width = max(FULL_WIDTH, _LABEL * len(columns) + _INCH * total)
    # Few heads are drawn larger, but not so large that two layers fill a screen.
    inch = min(1.6, (width - _LABEL * len(columns)) / total)
    width = max(4.0, _LABEL * len(columns) + inch * total)
    letters = [max(16, int(_LETTERS * inch * heads)) for heads in columns]
    titles = [textwrap.wrap(printable(name), most) for name, most in zip(figure.names, letters, strict=True)]
    height = 0.55 + 0.15 * max(map(len, titles)) + inch * rows
    canvas = Figure(figsize=(width, height), layout="constrained")
    panels = canvas.subplots(1, len(columns), squeeze=False, width_ratios=columns)[0]
    size = _pixels_of_a_map(figure.maps)
    for axes, maps, title, labels in zip(panels, figure.maps, titles, figure.labels, strict=True):
        _draw_model(axes, maps, size)
        axes.set_title("\n".join(title), fontsize=8.5, loc="left")
        axes.set_yticks([_centre(row, size) for row in range(len(labels))], labels, fontsize=7.5)
        axes.set_xlabel(figure.head, fontsize=8)
    return canvas


def _draw_model(axes: Axes, maps: Sequence[LayerMap], size: int) -> None:
    heads = max(len(own.weights) for own in maps)
    side = size + _GAP
    picture = np.full((len(maps) * side - _GAP, heads * side - _GAP), np.nan, np.float32)
    for row, own in enumerate(maps):
        for column, weights in enumerate(own.weights):
            picture[row * side : row * side + size, column * side : column * side + size] = resized(weights, size)
    axes.imshow(_coloured(picture), interpolation="none", aspect="equal")
    axes.set_xticks([_centre(column, size) for column in range(heads)], [str(head) for head in range(heads)])
    axes.tick_params(length=0, labelsize=7.5)
    axes.grid(visible=False)
    for spine in axes.spines.values():
        spine.set_visible(False)


def resized(weights: Pixels, size: int) -> Pixels:
    """Return a map of size x size points: points repeated, or the largest weight of those that one stands for."""
    for axis in (0, 1):
        length = weights.shape[axis]
        if length > size:
            weights = np.maximum.reduceat(weights, np.arange(size) * length // size, axis=axis)
        else:
            weights = weights.take(np.arange(size) * length // size, axis=axis)
    return weights


def _coloured(picture: Pixels) -> npt.NDArray[np.uint8]:
    """Return the weights as one colour, the more opaque the larger, so that they show on light and dark pages.

    A map's ground is a little opaque; what lies between maps is not at all.
    """
    red, green, blue = (int(COLOURS[1][start : start + 2], 16) for start in (1, 3, 5))
    out = np.zeros((*picture.shape, 4), np.uint8)
    out[..., 0], out[..., 1], out[..., 2] = red, green, blue
    # The root shows small weights too: of 64 keys that are seen alike, each has a weight of 0.016.
    opacity = 0.06 + 0.94 * np.sqrt(np.clip(picture, 0, 1))
    out[..., 3] = np.where(np.isnan(picture), 0, np.rint(255 * opacity))
    return out


def _pixels_of_a_map(models: Sequence[Sequence[LayerMap]]) -> int:
    count = sum(len(own.weights) for maps in models for own in maps)
    tokens = max(max(own.weights.shape[1:]) for maps in models for own in maps)
    size = max(_SMALLEST, min(_LARGEST, int((_PIXELS / count) ** 0.5)))
    # A whole multiple of the tokens, so that all points are of one size.
    return size if tokens > size else size // tokens * tokens


def _centre(index: int, size: int) -> float:
    return index * (size + _GAP) + (size - 1) / 2
