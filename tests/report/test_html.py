"""The page in a real browser: it makes no requests, shows no errors, and its controls work."""

import os
import re
import shutil
from pathlib import Path

import pytest

from oelm.report import write_report
from tests.support.records import classification_run, language_run, study

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install playwright")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here: apt install chromium"),
]


@pytest.fixture(scope="module")
def page_file(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    study(root)
    language_run(root, "oelm-random-matched", 0, 3.31)
    language_run(root, {"preset": "identity-core", "reach": [8, 8, 2, 2, 2, 2]}, 0, 3.2)
    for seed, noise in enumerate((0.0, 0.003, -0.002)):
        for method, accuracy in (("baseline", 0.93), ("oelm-freeze", 0.91)):
            classification_run(root, method, seed, accuracy + noise * len(method) / 10)
    out = tmp_path_factory.mktemp("page")
    write_report([root], out, formats=("html",))
    return out / "report.html"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser, page_file):
    """Return a function that opens the page in a window, and records its requests and its errors."""
    contexts = []

    def open_in_window(width=1280, height=900, scheme="light"):
        context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.requests, page.errors = [], []
        page.on("request", lambda request: page.requests.append(request.url))
        page.on("console", lambda message: page.errors.append(message.text))
        page.on("pageerror", lambda error: page.errors.append(str(error)))
        page.route(re.compile("^(?!file:)"), lambda route: route.abort())
        page.goto(page_file.as_uri())
        page.wait_for_selector("html[data-ready='true']")
        return page

    yield open_in_window
    for context in contexts:
        context.close()


def chart(page, name):
    return page.locator(f"figure[id$='-{name}']").last


def test_the_page_opens_from_disk_without_requests_or_errors(open_page, page_file):
    page = open_page()
    page.mouse.wheel(0, 20_000)
    assert page.requests == [page_file.as_uri()]
    assert page.errors == []
    assert page.locator("figure").count() == page.locator("figure .plot > svg").count() > 10
    text = page_file.read_text(encoding="utf-8")
    assert not re.findall(r"""(?:src|href)=["'](?:https?:)?//""", text)
    assert len(text) < 1_000_000


def test_a_click_on_a_name_in_the_legend_hides_its_lines_and_marks_show_their_values(open_page):
    page = open_page()
    figure = chart(page, "validation")
    lines = figure.locator("[data-series=oelm-freeze]")
    entry = figure.locator("[data-legend=oelm-freeze]")
    assert lines.count() == figure.locator("[data-series=baseline]").count() >= 4, "a line and a band, by step and time"
    assert lines.first.is_visible()
    entry.click()
    assert not any(line.is_visible() for line in lines.all())
    assert entry.get_attribute("aria-pressed") == "false"
    assert figure.locator("[data-series=baseline]").first.is_visible()
    entry.press("Enter")
    assert lines.first.is_visible()
    values = lines.locator("use title").all_text_contents()
    assert len(values) > 1
    assert all(re.fullmatch(r"oelm-freeze \([\d.,]+\): [\d.]+ \(.+\s– .+\)", value) for value in values), values


@pytest.mark.full
def test_the_first_screen_has_the_finding_the_forest_plot_and_the_table(browser, tmp_path):
    study(tmp_path / "runs")
    write_report([tmp_path / "runs"], tmp_path / "out", formats=("html",))
    page = browser.new_page(viewport={"width": 1280, "height": 900})
    page.goto((tmp_path / "out" / "report.html").as_uri())
    bottoms = [
        page.locator(selector).first.evaluate("element => element.getBoundingClientRect().bottom")
        for selector in ("p.lead", "figure[id$='-change']", "table.data")
    ]
    page.close()
    assert max(bottoms) < 900
    assert bottoms[0] < min(bottoms[1:])


@pytest.mark.full
def test_figures_follow_the_theme(open_page):
    def text_colour(page):
        return page.evaluate("getComputedStyle(document.querySelector('figure svg text')).fill")

    assert text_colour(open_page(scheme="light")) != text_colour(open_page(scheme="dark"))


@pytest.mark.full
def test_references_link_to_the_run_and_its_folder(open_page):
    page = open_page()
    reference = page.locator("#results-1 ~ .scroll .refs a").first
    handle = reference.text_content()
    reference.click()
    row = page.locator(f"#run-{handle}")
    assert row.is_visible()
    href = row.locator("td a").last.get_attribute("href")
    folder = Path(page.url.removeprefix("file://").split("#")[0]).parent / href
    assert (folder / "result.json").is_file()


def test_a_click_on_a_column_title_sorts_the_table(open_page):
    page = open_page()
    table = page.locator("#runs ~ .scroll table").first
    head = table.locator("th", has_text="figure")
    head.click()

    def column():
        cells = table.locator("tbody td:nth-child(5)").all_text_contents()
        return [float(re.sub("[^0-9.]", "", cell)) for cell in cells]

    values = column()
    assert values == sorted(values)
    head.click()
    assert column() == sorted(values, reverse=True)


@pytest.mark.full
def test_the_theme_follows_the_system_until_the_reader_chooses(open_page):
    def background(page):
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light, dark = open_page(scheme="light"), open_page(scheme="dark")
    assert background(light) == "rgb(255, 255, 255)"
    assert background(dark) == "rgb(20, 23, 28)"
    light.locator("#theme").click()
    assert background(light) == background(dark)
    light.locator("#theme").click()
    assert background(light) == "rgb(255, 255, 255)"


@pytest.mark.sample(1)
@pytest.mark.parametrize(("name", "width", "height"), [("desktop", 1280, 900), ("phone", 390, 844)])
def test_the_page_fits_the_screen(open_page, tmp_path, name, width, height):
    """Neither the page nor a table scrolls sideways. OELM_SCREENSHOTS names a folder to keep images."""
    page = open_page(width, height)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    boxes = page.locator(".scroll, figure.half .plot")
    cut = boxes.evaluate_all("boxes => boxes.filter(box => box.scrollWidth > box.clientWidth + 1).length")
    assert cut == 0, "a table or a narrow figure is wider than the screen"
    small_buttons = page.evaluate("[...document.querySelectorAll('button')].filter(b => b.offsetHeight < 24).length")
    assert small_buttons == 0
    folder = Path(os.environ.get("OELM_SCREENSHOTS", tmp_path))
    page.screenshot(path=folder / f"report-{name}.png", full_page=True)
    assert (folder / f"report-{name}.png").stat().st_size > 20_000
    assert page.errors == []


@pytest.mark.full
def test_chinese_headings_and_verdicts_are_not_broken_within_a_word(browser, tmp_path):
    write_report([study(tmp_path / "runs")], tmp_path / "out", language="zh", formats=("html",))
    page = browser.new_page(viewport={"width": 800, "height": 900})
    page.goto((tmp_path / "out" / "report.html").as_uri())
    words = page.locator("thead th, .chip").filter(has_text=re.compile(r"^\s*[\u4e00-\u9fff]+\s*$"))
    assert words.count() > 10
    lines_of = "word => { const text = document.createRange(); text.selectNodeContents(word); return text; }"
    broken = f"words => words.map({lines_of}).filter(text => text.getClientRects().length > 1).map(String)"
    assert words.evaluate_all(broken) == []
