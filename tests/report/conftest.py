"""Records and a report that several test files share."""

import pytest

from oelm.report import write_report
from tests.support.records import (
    classification_run,
    language_run,
    study,
    write_status,
)


@pytest.fixture(scope="session")
def runs(tmp_path_factory):
    """Return a folder with runs of a language model, of a classifier, and runs that are not counted."""
    root = tmp_path_factory.mktemp("runs")
    study(root)
    language_run(root, "oelm-random-matched", 0, 3.31)
    for seed, noise in enumerate((0.0, 0.003, -0.002)):
        for method, accuracy in (("baseline", 0.93), ("oelm-freeze", 0.91), ("freeze-pretrained", 0.925)):
            classification_run(root, method, seed, accuracy + noise * len(method) / 10)
    classification_run(root, "oelm-random", 0, 0.51, at_chance=True)
    failed = language_run(root, "oelm-core", 0, rate=4e-3)
    (failed / "result.json").unlink()
    write_status(failed, "failed", message="TrainingError: the disk is full")
    return root


@pytest.fixture(scope="session")
def report(runs, tmp_path_factory):
    """Return the report on these runs, in every format."""
    return write_report([runs], tmp_path_factory.mktemp("report"))
