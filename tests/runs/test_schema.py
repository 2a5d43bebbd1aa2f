"""The typed records of a run: one format number, exact round trips, and errors that name the field."""

import json
import math

import pytest

from oelm.config import RunConfig
from oelm.errors import FileError, FormatError
from oelm.runs.folder import RunFolder, line_to_json, read_metrics
from oelm.runs.schema import (
    FORMAT,
    Audit,
    Clock,
    Environment,
    RecordedConfig,
    Result,
    Timing,
    TrainLine,
    parse_line,
    read,
)
from tests.support.records import change, classification_run, language_run

RECORDS = {
    "config.json": RecordedConfig,
    "environment.json": Environment,
    "audit.json": Audit,
    "timing.json": Timing,
    "result.json": Result,
}


@pytest.mark.parametrize("write_run", [language_run, classification_run])
@pytest.mark.parametrize("name", RECORDS)
def test_reading_and_writing_a_record_does_not_change_it(write_run, name, tmp_path):
    path = write_run(tmp_path) / name
    before = json.loads(path.read_text(encoding="utf-8"))
    read(path, RECORDS[name]).write(path)
    assert json.loads(path.read_text(encoding="utf-8")) == before
    assert before["format"] == FORMAT


def test_a_config_keeps_the_id_that_was_recorded(tmp_path):
    folder = language_run(tmp_path)
    change(folder, "config.json", id="of an older default")
    recorded = read(folder / "config.json", RecordedConfig)
    assert recorded.id == "of an older default" != recorded.config.id


def test_a_non_finite_number_is_written_as_null():
    line = TrainLine(step=1, tokens=8, loss=math.nan, time=Clock(seconds=1.0))
    assert json.loads(line_to_json(line))["loss"] is None
    assert parse_line(line_to_json(line)).loss is None


def test_writing_a_record_keeps_fields_that_the_schema_does_not_know(tmp_path):
    folder = language_run(tmp_path)
    change(folder, "timing.json", a_field_to_come=[1, 2])
    read(folder / "timing.json", Timing).write(folder / "timing.json")
    assert json.loads((folder / "timing.json").read_text())["a_field_to_come"] == [1, 2]


@pytest.mark.parametrize(
    ("values", "field"),
    [({"steps": "many"}, "steps"), ({"steps": True}, "steps"), ({"last": None}, "last"), ({"status": "?"}, "status")],
)
def test_the_error_for_an_invalid_field_names_the_field_and_its_file(values, field, tmp_path):
    folder = language_run(tmp_path)
    change(folder, "result.json", **values)
    with pytest.raises(FileError, match=rf"result\.json: {field}: "):
        read(folder / "result.json", Result)


def test_a_folder_with_a_run_of_another_format_is_refused_and_left_unchanged(tmp_path):
    """Even for the same config."""
    folder = language_run(tmp_path)
    config = RunConfig.load(read(folder / "config.json", RecordedConfig).config.to_dict())
    change(folder, "config.json", format=FORMAT - 1)
    before = {path.name: path.read_bytes() for path in folder.glob("*.json*")}
    with pytest.raises(FormatError, match=rf"format {FORMAT - 1}\b.*format {FORMAT}\b"):
        RunFolder(config).claim()
    assert {path.name: path.read_bytes() for path in folder.glob("*.json*")} == before
    assert read_metrics(folder)
