"""Where the loss lies: in a report's tables and data, and in `oelm compare`."""

import json

import pytest

from oelm.analysis import analyse, load_run
from oelm.cli.comparison import compare_text
from oelm.report.compose import compose
from oelm.report.tables import results_json
from tests.support.records import add_slices, language_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a folder with a baseline, a method that is worse on hits, and one without slices, of three seeds each."""
    root = tmp_path_factory.mktemp("runs")
    for seed in range(3):
        noise = 0.01 * seed
        for method, hit in (("baseline", 2.0 + noise), ("oelm-freeze", 2.5 + 2 * noise)):
            run = add_slices(language_run(root, method, seed, 3 + hit / 10), hit, 3.25)
            add_slices(run, hit, 3.5, text="test")
        language_run(root, "oelm-random", seed, 3.3 + noise)
    return root


@pytest.mark.parametrize(("language", "hit"), [("en", "pair seen before"), ("zh", "见过的词元对")])
def test_a_report_has_a_table_of_slices_for_each_text(runs, tmp_path, language, hit):
    tables = {table.name: table for table in compose(analyse([runs]), tmp_path, language).tables}
    for text in ("validation", "test"):
        rows = [[cell.text for cell in row] for row in tables[f"1-slices-{text}"].rows]
        assert {row[0] for row in rows} == {"oelm-freeze"}
        (row,) = [row for row in rows if row[2] == hit]
        assert row[3:6] == ["20.0 %", "2.0100", "+0.5100"]
        assert row[7] == "100.0 %"


def test_the_data_of_a_report_has_the_slices(runs):
    comparisons = json.loads(results_json(analyse([runs])))["comparisons"]
    slices = {comparison["arm"]: comparison.get("slices") for comparison in comparisons}
    assert slices["oelm-random"] is None
    assert slices["oelm-freeze"]["test"][1]["gap_share"] == pytest.approx(1)


def test_a_report_on_runs_without_slices_has_no_such_section(tmp_path):
    for method in ("baseline", "oelm-freeze"):
        language_run(tmp_path, method)
    headings = [heading.text for heading in compose(analyse([tmp_path]), tmp_path).headings]
    assert "Comparisons" in headings
    assert "Where the loss lies" not in headings


def test_two_runs_are_compared_by_slice(runs):
    found = {run.method: run for run in (load_run(result.parent) for result in runs.rglob("seed-1/result.json"))}
    lines = compare_text(found["oelm-freeze"], found["baseline"]).splitlines()
    start = lines.index("Slices of the validation text, with the last models:")
    hit = next(line for line in lines[start:] if "pair seen before" in line)
    assert hit.split()[-6:] == ["20.0", "%", "2.0100", "+0.5100", "100.0", "%"]
    assert max(map(len, lines[start:])) <= 80
    assert "Slices" not in compare_text(found["oelm-random"], found["baseline"])
