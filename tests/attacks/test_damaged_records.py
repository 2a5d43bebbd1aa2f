"""Damaged records: no command over many runs ends because of one; that run is left out, and the record is named."""

import json
import random
import shutil
from collections import Counter
from pathlib import Path

import pytest
from typer.testing import CliRunner

from oelm.analysis.analyse import analyse
from oelm.base.files import read_json
from oelm.cli.app import app
from oelm.report.write import write_report
from tests.support.damage import VALUES, places_in
from tests.support.records import language_run, write

RUNS = 4


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> Path:
    """Return a folder with runs of two methods and two seeds."""
    root = tmp_path_factory.mktemp("runs")
    for seed in range(2):
        for method, loss in (("baseline", 3.2), ("oelm-freeze", 3.3)):
            run = language_run(root, method, seed, loss + 0.01 * seed, 1e-3)
            write(run, "status.json", {"format": 2, "id": read_json(run / "result.json")["id"], "state": "finished"})
    return root


def mutated(text: str, randomness: random.Random) -> str:
    """Return a JSON document with a value exchanged or removed, cut off, or with a bit flipped."""
    kind = randomness.random()
    if kind < 0.1:
        return text[: randomness.randrange(len(text))]
    if kind < 0.2:
        place = randomness.randrange(len(text))
        return text[:place] + chr(ord(text[place]) ^ 1 << randomness.randrange(5)) + text[place + 1 :]
    content = json.loads(text)
    *above, last = randomness.choice(list(places_in(content)))
    node = content
    for key in above:
        node = node[key]
    if kind < 0.4:
        del node[last]
    else:
        node[last] = randomness.choice(VALUES)
    return json.dumps(content)


def damage(run: Path, randomness: random.Random) -> str:
    """Damage one record of a run, and return its name."""
    file = randomness.choice(sorted(path for path in run.iterdir() if path.suffix in (".json", ".jsonl")))
    text = file.read_text()
    if file.suffix == ".jsonl":
        lines = text.splitlines()
        number = randomness.randrange(len(lines))
        lines[number] = mutated(lines[number], randomness)
        text = "".join(f"{line}\n" for line in lines)
    else:
        text = mutated(text, randomness)
    file.write_text(text)
    return file.name


def test_no_damaged_record_ends_a_command_over_many_runs(runs, rounds, tmp_path):
    randomness, outcomes = random.Random("records"), Counter()
    work = tmp_path / "work"
    for number in range(rounds(24)):
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(runs, work)
        run = randomness.choice(sorted(path.parent for path in work.rglob("result.json")))
        name = damage(run, randomness)
        found = analyse([work])
        seen = len(found.runs) + len(found.running) + len(found.left_out) + len(found.problems)
        assert seen >= RUNS - (name == "config.json"), f"{name}: a run is neither counted nor named"
        assert len(found.runs) >= RUNS - 1, "the others count"
        outcomes["left out" if found.left_out else "counted"] += 1
        commands = {
            "status": ["status", str(work)],
            "status --json": ["status", str(work), "--json"],
            "archive": ["archive", str(work), "--out", str(tmp_path / f"archive-{number}")],
            "clean": ["clean", str(work), "--yes"],
        }
        for command, arguments in commands.items():
            result = CliRunner().invoke(app, arguments)
            assert result.exit_code == 0, f"{command}, {name}: {result.output} {result.exception!r}"
            assert "\x1b[31mred" not in result.stdout, f"{command} passes on what a terminal obeys"
        if number % 12 == 11:
            assert write_report([work], tmp_path / "report", formats=("md", "html")).files
    print(dict(outcomes))
