"""The figures: legible with many long names, the same bytes each time, text that stays text."""

import re
import warnings
from xml.etree import ElementTree

import pytest

from oelm.report import drawing
from oelm.report.charts import COLOURS, ChartFigure, Grid, IntervalRow, Intervals, Lines, Series
from oelm.report.svg import themed

LONG = "oelm-freeze (adapter.kind=lora, adapter.rank=16, adapter.targets=q,k, costs=$5 or $6, 名字)"
SVG = "{http://www.w3.org/2000/svg}"


def crowded(count: int) -> list[ChartFigure]:
    """Figures of many methods with long names, among them characters that are markup elsewhere."""
    names = [f"{number} {LONG}" for number in range(count)]
    lines = [
        Series(name=name, style=i, x={"steps": [1.0, 2.0], "seconds": [1.0, 3.0]}, y=[1.0, i])
        for i, name in enumerate(names)
    ]
    rows = [IntervalRow(label=name, style=i, value=1.0, low=0.0, high=2.0) for i, name in enumerate(names)]
    shares = [[1.0 if row == column else 0.0 for column in range(count)] for row in range(count)]
    texts = [["100.0"] * count] * count
    grid = Grid(rows=names, columns=names, values=shares, texts=texts, title=LONG, x_label="x", y_label="y")
    return [
        ChartFigure("lines", "", "", [Lines(axes={"steps": "steps", "seconds": "s"}, y_label="loss", series=lines)]),
        ChartFigure("rows", "", "", [Intervals(x_label="x", rows=rows)]),
        ChartFigure("grids", "", "", [grid] * 3),
    ]


def drawn(figure: ChartFigure) -> str:
    return drawing.draw([figure])[figure.name].svg


def named(name: str, title: str = "Title", caption: str = "Caption") -> ChartFigure:
    """A figure of lines with one series of that name, drawn with marks and a band."""
    series = Series(name=name, style=0, x={"steps": [1.0, 2.0]}, y=[3.5, 2.5], low=[3.0, 2.0], high=[4.0, 3.0])
    return ChartFigure("named", title, caption, [Lines(axes={"steps": "steps"}, y_label="loss", series=[series])])


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize("count", [3, 17, 40])
def test_figures_of_many_long_names_are_legible(count):
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # matplotlib warns when something does not fit
        drawing.draw(crowded(count))
    for figure in crowded(count):
        canvas, _ = drawing._lay_out(figure)
        canvas.draw_without_rendering()
        whole = canvas.bbox
        axes = [panel.get_window_extent() for panel in canvas.axes]
        assert min(box.width for box in axes) > 0.25 * whole.width
        assert min(box.height for box in axes) > 0.8 * canvas.dpi, "less than 0.8 inches high"
        for legend in canvas.legends:
            below = legend.get_window_extent()
            assert below.y0 >= 0
            assert below.x0 >= 0
            assert below.x1 <= whole.x1
            assert below.y1 <= min(box.y0 for box in axes), "the legend covers the lines"


def test_the_same_figures_give_the_same_files():
    figures = crowded(3)
    assert drawing.draw(figures, png=True) == drawing.draw(figures, png=True)


def test_every_text_is_text_and_none_is_read_as_a_formula():
    svg = drawn(crowded(3)[1])
    shown = " ".join(element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text"))
    assert "costs=$5 or $6, 名字" in shown


def test_a_figure_has_its_title_and_caption_as_alt_text():
    root = ElementTree.fromstring(drawn(named("a", "Loss & more", "By <step>")))
    assert [(child.tag, child.text) for child in root[:2]] == [
        (f"{SVG}title", "Loss & more"),
        (f"{SVG}desc", "By <step>"),
    ]
    assert root.get("role") == "img"


def test_marks_tell_their_values_on_hover():
    titles = [element.text for element in ElementTree.fromstring(drawn(named("a"))).iter(f"{SVG}title")]
    assert "a (1): 3.5 (3 – 4)" in titles
    assert "a (2): 2.5 (2 – 3)" in titles


@pytest.mark.parametrize(
    "name", ["</svg><script>alert(1)</script>", '" onload="alert(1)', "a\x00b\x1bc", "$\\frac{$", "a & b", "&lt;", " "]
)
def test_a_name_with_markup_or_control_characters_is_shown_and_nothing_more(name):
    svg = drawn(named(name, title=name, caption=name))
    root = ElementTree.fromstring(svg)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        *("svg", "title", "desc", "g", "path", "defs", "use", "text", "clipPath", "rect"),
    }
    assert not [key for element in root.iter() for key in element.attrib if key.startswith("on")]


def test_on_the_page_every_colour_is_a_variable_and_no_id_is_there_twice():
    figures = crowded(17)
    page = "".join(themed(drawing.svg) for drawing in drawing.draw(figures).values())
    assert re.findall(r"#[0-9a-f]{6}\b", page) == []
    used = set(re.findall(r"var\(--(c\d)\)", page))
    assert used >= {f"c{number}" for number in range(1, len(COLOURS))}
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "<style" not in page
    assert "<image" not in page
