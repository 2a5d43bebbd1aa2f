"""The figures: legible with many long names, reproducible, and without markup from names."""

import re
import warnings
from xml.etree import ElementTree

import pytest
from matplotlib.font_manager import findSystemFonts, fontManager

from oelm.report import drawing
from oelm.report.charts import COLOURS, ChartFigure, Grid, IntervalRow, Intervals, Lines, Series, Styles
from oelm.report.svg import themed

LONG = "oelm-freeze (adapter.kind=lora, adapter.rank=16, adapter.targets=q,k, costs=$5 or $6, 名字)"
SVG = "{http://www.w3.org/2000/svg}"


def crowded(count: int) -> list[ChartFigure]:
    """Return figures with many methods whose long names contain characters that are markup in other formats."""
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


def svg_of(figure: ChartFigure) -> str:
    return drawing.draw([figure])[figure.name].svg


def figure_with_series(name: str, title: str = "Title", caption: str = "Caption") -> ChartFigure:
    """Return a line figure with one series of the given name, drawn with marks and a band."""
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
        canvas_box = canvas.bbox
        panel_boxes = [panel.get_window_extent() for panel in canvas.axes]
        assert min(box.width for box in panel_boxes) > 0.25 * canvas_box.width
        assert min(box.height for box in panel_boxes) > 0.8 * canvas.dpi, "less than 0.8 inches high"
        for legend in canvas.legends:
            legend_box = legend.get_window_extent()
            assert legend_box.y0 >= 0
            assert legend_box.x0 >= 0
            assert legend_box.x1 <= canvas_box.x1
            assert legend_box.y1 <= min(box.y0 for box in panel_boxes), "the legend covers the lines"


def test_the_same_figures_give_the_same_files():
    figures = crowded(3)
    assert drawing.draw(figures, png=True) == drawing.draw(figures, png=True)


def test_names_are_drawn_as_text_and_never_as_formulas():
    svg = svg_of(crowded(3)[1])
    shown = " ".join(element.text for element in ElementTree.fromstring(svg).iter(f"{SVG}text"))
    assert "costs=$5 or $6, 名字" in shown


@pytest.mark.parametrize(
    ("label", "wide"),
    [
        ("identity-core (reach=8,8,2,2,2,2)", False),
        ("oelm-freeze (k.scale=4.0, q.scale=4.0)", False),
        ("oelm-freeze (schedule.order=bottom-up)", True),
        ("oelm-freeze: Project Gutenberg prose, batch 64, 8,000 steps", True),
    ],
)
def test_a_forest_plot_is_narrow_where_its_labels_break_between_words(label, wide):
    """A narrow one fits a phone, and stands beside the table of its methods."""
    figure = ChartFigure("rows", "", "", [Intervals(x_label="x", rows=[IntervalRow(label=label, style=1, value=1.0)])])
    assert drawing.is_wide(figure) is wide
    drawn = [element.text for element in ElementTree.fromstring(svg_of(figure)).iter(f"{SVG}text")]
    assert "".join(label.split()) in "".join("".join(text or "" for text in drawn).split())


def test_a_figure_has_its_title_and_caption_as_alt_text():
    root = ElementTree.fromstring(svg_of(figure_with_series("a", "Loss & more", "By <step>")))
    assert [(child.tag, child.text) for child in root[:2]] == [
        (f"{SVG}title", "Loss & more"),
        (f"{SVG}desc", "By <step>"),
    ]
    assert root.get("role") == "img"


def test_marks_show_their_values_on_hover():
    titles = [element.text for element in ElementTree.fromstring(svg_of(figure_with_series("a"))).iter(f"{SVG}title")]
    assert "a (1): 3.5 (3 – 4)" in titles
    assert "a (2): 2.5 (2 – 3)" in titles


@pytest.mark.parametrize(
    "name", ["</svg><script>alert(1)</script>", '" onload="alert(1)', "a\x00b\x1bc", "$\\frac{$", "a & b", "&lt;", " "]
)
def test_markup_and_control_characters_in_a_name_are_only_shown(name):
    svg = svg_of(figure_with_series(name, title=name, caption=name))
    root = ElementTree.fromstring(svg)
    assert {element.tag.removeprefix(SVG) for element in root.iter()} <= {
        *("svg", "title", "desc", "g", "path", "defs", "use", "text", "clipPath", "rect"),
    }
    assert not [key for element in root.iter() for key in element.attrib if key.startswith("on")]


def test_themed_figures_have_variables_for_colours_and_unique_ids():
    figures = crowded(17)
    page = "".join(themed(drawing.svg) for drawing in drawing.draw(figures).values())
    assert re.findall(r"#[0-9a-f]{6}\b", page) == []
    used = set(re.findall(r"var\(--(c\d)\)", page))
    assert used >= {f"c{number}" for number in range(1, len(COLOURS))}
    ids = re.findall(r' id="([^"]+)"', page)
    assert len(ids) == len(set(ids))
    assert "<style" not in page
    assert "<image" not in page


def test_panels_of_one_quantity_share_an_axis():
    def lines(label, high, title):
        series = Series(name="a", style=0, x={"steps": [1.0, 2.0]}, y=[1.0, high])
        return Lines(axes={"steps": "steps"}, y_label=label, series=[series], title=title)

    def rows(value):
        return Intervals(x_label="change", rows=[IntervalRow(label="a", style=1, value=value, low=0.0, high=value)])

    shared = ChartFigure("shared", "", "", [lines("entropy", 2.0, "x"), lines("entropy", 9.0, "y")])
    other = ChartFigure("other", "", "", [lines("loss", 2.0, ""), lines("rate", 9.0, "")])
    forest = ChartFigure("forest", "", "", [rows(3.0), rows(30.0)])
    limits = {}
    for figure in (shared, other, forest):
        canvas, _ = drawing._lay_out(figure)
        limits[figure.name] = [(axes.get_xlim(), axes.get_ylim()) for axes in canvas.axes]
    assert limits["shared"][0][1] == limits["shared"][1][1]
    assert limits["other"][0][1] != limits["other"][1][1]
    assert limits["forest"][0][0] == limits["forest"][1][0]


def test_black_is_the_baselines_and_styles_of_one_colour_differ_in_their_mark():
    assert Styles(["oelm-freeze"])["oelm-freeze"] != Styles(["oelm-freeze"])["baseline"] == 0
    styles = [drawing._style(number) for number in range(50)]
    assert [number for number, (colour, _, _) in enumerate(styles) if colour == COLOURS[0]] == [0]
    assert len({(colour, mark) for colour, _, mark in styles}) == 50


def test_chinese_characters_of_a_png_are_drawn_and_not_boxes():
    if drawing.cjk_font() is None:
        pytest.skip("no CJK font: fonts-noto-cjk has one")
    grids = [Grid(rows=["a"], columns=["b"], values=[[0.0]], texts=[[""]], title=title) for title in "头甲"]
    first, second = (drawing.draw([ChartFigure("grid", "", "", [grid])], png=True)["grid"].png for grid in grids)
    assert first != second, "all boxes are alike"


def test_a_chinese_font_that_was_installed_after_matplotlibs_first_use_is_found(monkeypatch):
    if not any("CJK" in path for path in findSystemFonts()):
        pytest.skip("no CJK font: fonts-noto-cjk has one")
    known = [font for font in fontManager.ttflist if "CJK" not in font.fname]
    monkeypatch.setattr(fontManager, "ttflist", known)
    assert drawing.cjk_font() in drawing.CJK_FONTS


def test_the_last_number_of_an_axis_is_not_cut_off():
    """An axis that gets wider when it is laid out may get one more number, at its very end."""
    row = IntervalRow(label="oelm-random-matched", style=0, value=42.0, low=-36.0, high=118.0)
    rows = [row, IntervalRow(label="oelm-random", style=1, value=4.0, low=-1.0, high=9.0)] * 2
    svg = svg_of(ChartFigure("change", "", "", [Intervals(x_label="change (%)", rows=rows, line=0.0)]))
    whole = float(re.search(r'viewBox="0 0 ([\d.]+)', svg)[1])
    ticks = re.findall(r'<text style="[^"]*middle[^"]*" x="([\d.]+)"[^>]*>(\d+)</text>', svg)
    assert len(ticks) > 2
    digit = 0.636 * 9  # DejaVu Sans at 9 points
    assert all(float(x) + len(number) * digit / 2 < whole for x, number in ticks)
