"""docs/results.md is what the records give today, and its words hold no measured number."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from oelm.analysis import AnalysisError
from oelm.report.evidence import write_evidence

ROOT = Path(__file__).parent.parent


def test_the_document_is_up_to_date(tmp_path):
    pytest.importorskip("scipy")
    # Links lead from where the document lies, so it is written there under another name.
    there = ROOT / "docs" / "results.md"
    again = write_evidence(ROOT / "results/questions.yaml", there.with_name(".results-again.md"), draw=False)
    try:
        assert again.read_text(encoding="utf-8") == there.read_text(encoding="utf-8"), "run `make results`"
    finally:
        again.unlink()


def test_its_figures_are_there():
    text = (ROOT / "docs/results.md").read_text(encoding="utf-8")
    linked = [part.partition(")")[0] for part in text.split("](figures/")[1:]]
    assert linked
    assert all((ROOT / "docs/figures" / name).is_file() for name in linked)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"conclusion": "It loses 12.3 % there."}, "is a measured number"),
        ({"runs": ["nothing-*"]}, "no record below"),
        ({"asks": "x"}, "unknown key"),
    ],
)
def test_bad_questions_are_refused(changes, says, tmp_path):
    good = {"id": "one", "question": "Why?", "setting": "Here.", "conclusion": "So.", "open": "All."}
    file = tmp_path / "questions.yaml"
    file.write_text(yaml.safe_dump({"title": "T", "about": "A", "questions": [{**good, **changes}]}))
    with pytest.raises(AnalysisError, match=says):
        write_evidence(file, tmp_path / "results.md", draw=False)
