"""Reading records: runs that count, runs that are left out and why, and paths without runs."""

import json
import os
import shutil
import socket
import time
from pathlib import Path

import pytest

from oelm.analysis import AnalysisError, load_run, load_runs
from oelm.analysis.arms import group_runs
from oelm.analysis.run import method_label
from oelm.base.locks import hold
from oelm.lab.status import read_state
from oelm.method.spec import Method
from oelm.runs.schema import FORMAT
from tests.support.records import bench_row, change, classification_run, language_run, write, write_status

RESULTS = Path(__file__).parents[2] / "results" / "books-65m-first"


def left_out(loaded):
    return {item.path: (item.kind, item.reason) for item in loaded.left_out}


def test_the_records_of_real_runs_are_read():
    loaded = load_runs([RESULTS])
    assert len(loaded.runs) == 22
    assert not loaded.left_out
    run = loaded.runs[2]
    assert (run.method, run.seed, run.rate, run.task.kind) == ("baseline", 0, 0.002, "language")
    assert run.dataset == "Project Gutenberg prose, a stand-in for OpenWebText"
    assert run.figure("perplexity") == pytest.approx(49.99, abs=0.01)
    assert "runs shared the GPU" in run.times_doubt


def test_runs_below_a_folder_are_found_and_counted_once(tmp_path):
    first = language_run(tmp_path / "a", seed=0)
    language_run(tmp_path / "b" / "deeper", seed=1)
    (tmp_path / "b" / "back").symlink_to(tmp_path)
    loaded = load_runs([tmp_path, first, first.parent, tmp_path / "b"])
    assert len(loaded.runs) == 2
    assert not loaded.left_out
    assert load_run(first).seed == 0


def test_runs_that_cannot_be_averaged_are_left_out_with_their_reason(tmp_path):
    good = language_run(tmp_path, seed=0)
    damaged = language_run(tmp_path, seed=1)
    (damaged / "result.json").write_text('{"val_loss": 3.0, "perp', encoding="utf-8")
    torn = language_run(tmp_path, seed=2)
    complete_line = '{"kind": "attention", "step": 1, "layers": []}\n'
    (torn / "metrics.jsonl").write_text(f'{complete_line}{{"kind"\n{complete_line}', encoding="utf-8")
    failed = language_run(tmp_path, seed=3)
    (failed / "result.json").unlink()
    write_status(failed, "failed", message="TrainingError: step 7: the gradient is not finite")
    stopped = language_run(tmp_path, seed=4)
    (stopped / "result.json").unlink()
    write_status(stopped, "stopped", step=120)
    gone = language_run(tmp_path, seed=5)
    (gone / "result.json").unlink()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
    this_machine = {"host": socket.gethostname(), "pid": pid, "updated": time.time()}
    write_status(gone, "running", step=90, **this_machine)
    silent = language_run(tmp_path, seed=6)
    (silent / "result.json").unlink()
    diverged = language_run(tmp_path, seed=7, loss=None)
    guessing = classification_run(tmp_path, seed=8, accuracy=0.51, at_chance=True)
    mixed = language_run(tmp_path, seed=9)
    change(mixed, "result.json", id="another")
    no_config = language_run(tmp_path, seed=10)
    (no_config / "config.json").unlink()

    loaded = load_runs([tmp_path])
    reasons = left_out(loaded)
    assert [run.path for run in loaded.runs] == [good]
    assert {path: kind for path, (kind, _) in reasons.items()} == {
        damaged: "damaged",
        torn: "damaged",
        failed: "failed",
        stopped: "cut",
        gone: "cut",
        silent: "unfinished",
        diverged: "diverged",
        guessing: "at-chance",
        mixed: "damaged",
        no_config: "damaged",
    }
    assert str(damaged / "result.json") in reasons[damaged][1]
    assert "metrics.jsonl: line 2" in reasons[torn][1]
    assert "the gradient is not finite" in reasons[failed][1]
    assert "step 120 of 400" in reasons[stopped][1]
    assert "process is gone" in reasons[gone][1]
    assert "51.0%" in reasons[guessing][1]
    assert "another" in reasons[mixed][1]
    assert "config.json: missing" in reasons[no_config][1]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("audit.json", {"format": FORMAT, "rows": 3}),
        ("audit.json", {"format": FORMAT, "rows": [3]}),
        ("audit.json", []),
        ("audit.json", {"format": FORMAT, "rows": [{"role": "v", "shape": ["a", "b"]}]}),
        ("timing.json", {"format": FORMAT, "step_seconds": "x"}),
    ],
)
def test_a_malformed_record_leaves_out_only_its_own_run(name, content, tmp_path):
    language_run(tmp_path, seed=0)
    write(language_run(tmp_path, seed=1), name, content)
    loaded = load_runs([tmp_path])
    assert len(loaded.runs) == 1
    assert [item.kind for item in loaded.left_out] == ["damaged"]


@pytest.mark.parametrize(
    ("name", "values", "field"),
    [
        ("result.json", {"notes": None}, "notes"),
        ("result.json", {"best": [1]}, "best"),
        ("result.json", {"evaluations": {"mismatched": None}}, "evaluations.mismatched"),
        ("result.json", {"reached": {"60.0": {"step": 1, "tokens": 8}}}, "reached.60.0.seconds"),
        ("result.json", {"reached": {"sixty": {"step": 1, "seconds": 2.0}}}, "reached.sixty"),
        ("timing.json", {"step_seconds_sample": [None]}, "step_seconds_sample.0"),
        ("audit.json", {"rows": [{"role": "q", "shape": [], "kind": "decoder"}]}, "rows.0.layer"),
        ("environment.json", {"gpu": "H200"}, "gpu"),
    ],
)
def test_a_damaged_field_is_named_and_leaves_out_only_its_own_run(name, values, field, tmp_path):
    language_run(tmp_path, seed=0)
    damaged = language_run(tmp_path, seed=1)
    change(damaged, name, **values)
    loaded = load_runs([tmp_path])
    assert len(loaded.runs) == 1
    kind, reason = left_out(loaded)[damaged]
    assert kind == "damaged"
    assert f"{damaged / name}: {field}" in reason


@pytest.mark.parametrize("line", ['{"step": 3}', '{"kind": "val"}', "[1]"])
def test_a_damaged_line_of_metrics_leaves_out_only_its_own_run(line, tmp_path):
    language_run(tmp_path, seed=0)
    damaged = language_run(tmp_path, seed=1)
    lines = (damaged / "metrics.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (damaged / "metrics.jsonl").write_text("".join([*lines[:2], f"{line}\n", *lines[2:]]), encoding="utf-8")
    loaded = load_runs([tmp_path])
    assert len(loaded.runs) == 1
    assert "metrics.jsonl: line 3 is damaged" in left_out(loaded)[damaged][1]


def test_an_unreadable_record_leaves_out_only_its_own_run(tmp_path, monkeypatch):
    language_run(tmp_path, seed=0)
    locked = language_run(tmp_path, seed=1)
    methods = Path.read_bytes, Path.read_text, Path.open

    def guarded(method):
        def guard(self, *arguments, **options):
            if self.name == "metrics.jsonl" and self.parent == locked:
                raise PermissionError(13, "Permission denied", str(self))
            return method(self, *arguments, **options)

        return guard

    for name, method in zip(("read_bytes", "read_text", "open"), methods, strict=True):
        monkeypatch.setattr(Path, name, guarded(method))
    loaded = load_runs([tmp_path])
    assert len(loaded.runs) == 1
    (item,) = loaded.left_out
    assert str(locked / "metrics.jsonl") in item.reason
    assert "Permission denied" in item.reason


def test_a_run_in_progress_is_neither_counted_nor_left_out(tmp_path):
    folder = language_run(tmp_path)
    (folder / "result.json").unlink()
    write_status(folder, "running", host=socket.gethostname(), pid=os.getpid(), step=80)
    with hold(folder):
        loaded = load_runs([tmp_path])
        assert ([run.path for run in loaded.running], loaded.runs, loaded.left_out) == ([folder], (), ())
    elsewhere = {"host": "another-machine", "pid": 1, "step": 80}
    write_status(folder, "running", **elsewhere, updated=time.time())
    assert load_runs([tmp_path]).running
    write_status(folder, "running", **elsewhere, updated=time.time() - 86_400)
    assert [item.kind for item in load_runs([tmp_path]).left_out] == ["cut"]
    with pytest.raises(AnalysisError, match="process is gone"):
        load_run(folder)


def test_the_report_and_the_lab_agree_on_which_runs_are_alive(tmp_path):
    """A process that died may have passed its number to another one, so only the folder's lock decides."""
    folder = language_run(tmp_path)
    (folder / "result.json").unlink()
    this_process = {"host": socket.gethostname(), "pid": os.getpid(), "step": 80, "updated": time.time() - 11 * 86_400}
    write_status(folder, "running", **this_process)
    assert [item.kind for item in load_runs([tmp_path]).left_out] == ["cut"]
    assert read_state(folder).state == "died"
    for state in ("running", "failed"):  # a failed run may be running again
        write_status(folder, state, **this_process)
        with hold(folder):
            assert [run.path for run in load_runs([tmp_path]).running] == [folder]
            assert read_state(folder).state == "running"


def test_copies_of_a_run_are_counted_once(tmp_path):
    folder = language_run(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "b")
    renamed = language_run(tmp_path / "c", changes={"experiment": "the-same-under-another-name"})
    loaded = load_runs([tmp_path])
    assert [run.path for run in loaded.runs] == [folder]
    assert {item.kind for item in loaded.left_out} == {"duplicate"}
    assert renamed in {item.path for item in loaded.left_out}
    assert all(str(folder) in item.reason for item in loaded.left_out)


@pytest.mark.parametrize(
    ("first", "again"),
    [
        ({"splits": {"train": {"file": "train.csv"}}}, {"splits": {"train": {"file": "sst2/train.csv"}}}),
        ({"splits": {"train": {"file": "train.csv"}}}, {}),
        ({"description": "sst2 of GLUE; rows: all"}, {}),
    ],
    ids=["different path to the file", "no file name", "longer description"],
)
def test_a_seed_that_was_run_twice_on_the_same_data_is_counted_once(tmp_path, first, again):
    """Two runs of one cell and seed are one piece of evidence, whatever their folders and data paths."""
    for place, data in (("a", first), ("b", again)):
        for method, accuracy in (("baseline", 0.9), ("oelm-freeze", 0.91)):
            classification_run(tmp_path / place, method, 0, accuracy, environment={"data": data})
    loaded = load_runs([tmp_path])
    assert [(run.method, run.path.is_relative_to(tmp_path / "a")) for run in loaded.runs] == [
        ("baseline", True),
        ("oelm-freeze", True),
    ]
    assert [item.kind for item in loaded.left_out] == ["duplicate"] * 2
    (group,) = group_runs(loaded.runs)
    assert [[run.seed for run in arm.runs] for arm in group.setups[0].arms] == [[0], [0]]


def test_a_seed_that_was_run_on_other_data_is_another_run(tmp_path):
    for sha in ("aa" * 32, "bb" * 32):
        environment = {"data": {"splits": {"train": {"sha256": sha}}}}
        classification_run(tmp_path / sha[:2], "baseline", 0, 0.9, environment=environment)
    assert len(load_runs([tmp_path]).runs) == 2


def test_a_run_needs_no_status_and_no_log(tmp_path):
    folder = language_run(tmp_path)
    assert not (folder / "status.json").exists()
    assert load_run(folder).figure("steps_per_hour") == pytest.approx(3600 / 0.02)


@pytest.mark.parametrize("name", ["environment.json", "timing.json", "audit.json"])
def test_a_run_with_a_missing_record_is_left_out_and_the_file_is_named(name, tmp_path):
    language_run(tmp_path, seed=0)
    folder = language_run(tmp_path, seed=1)
    (folder / name).unlink()
    loaded = load_runs([tmp_path])
    assert len(loaded.runs) == 1
    kind, reason = left_out(loaded)[folder]
    assert (kind, str(folder / name) in reason) == ("damaged", True)


@pytest.mark.parametrize("name", ["config.json", "environment.json", "timing.json", "audit.json", "result.json"])
@pytest.mark.parametrize("format_number", [FORMAT - 1, FORMAT + 1, None, "two"])
def test_a_record_of_another_format_is_left_out_and_says_what_to_do(name, format_number, tmp_path):
    language_run(tmp_path, seed=0)
    folder = language_run(tmp_path, seed=1)
    change(folder, name, format=format_number)
    loaded = load_runs([tmp_path])
    assert len(loaded.runs) == 1
    kind, reason = left_out(loaded)[folder]
    assert kind == "format"
    expected = "no format number" if format_number is None else f"format {format_number!r}"
    for part in (str(folder / name), expected, f"reads format {FORMAT}", "train the run again"):
        assert part in reason
    if name in ("config.json", "result.json"):  # the lab reads only these
        assert read_state(folder).message == reason


def test_a_config_with_an_unknown_field_is_left_out_and_the_field_is_named(tmp_path):
    language_run(tmp_path, seed=0)
    strange = language_run(tmp_path, seed=1)
    change(strange, "config.json", a_field_of_another_kind=3)
    method = language_run(tmp_path, seed=3)
    change(method, "config.json", method={"another_field": 3})
    loaded = load_runs([tmp_path])
    assert len(loaded.runs) == 1
    assert "a_field_of_another_kind" in left_out(loaded)[strange][1]
    assert "another_field" in left_out(loaded)[method][1]


def test_unknown_fields_in_records_are_accepted(tmp_path):
    folder = language_run(tmp_path)
    for name in ("environment.json", "timing.json", "audit.json", "result.json"):
        change(folder, name, a_field_to_come=3)
    assert load_run(folder).result.perplexity is not None


def test_paths_without_runs_are_named_with_the_reason(tmp_path):
    with pytest.raises(AnalysisError, match="no such file or folder"):
        load_runs([tmp_path / "nowhere"])
    empty, model, text = tmp_path / "empty", tmp_path / "model", tmp_path / "notes.txt"
    empty.mkdir()
    write(model, "config.json", {"model_type": "bert"})
    text.write_text("hello")
    with pytest.raises(AnalysisError, match=r"empty: .*`oelm train`"):
        load_runs([empty])
    with pytest.raises(AnalysisError, match="a model's"):
        load_runs([model])
    with pytest.raises(AnalysisError, match="a file, neither a run's folder nor"):
        load_runs([text])
    run = language_run(tmp_path / "runs")
    loaded = load_runs([run, empty, model])
    assert len(loaded.runs) == 1
    assert [problem.split(": ")[0] for problem in loaded.problems] == [str(empty), str(model)]
    with pytest.raises(AnalysisError, match="holds no run"):
        load_run(empty)


def test_a_method_is_labelled_by_its_preset_and_the_fields_that_differ_from_it():
    def label(**changes):
        return method_label(Method.load(changes))

    assert label(preset="oelm-freeze") == "oelm-freeze"
    assert label(preset="oelm-core", layers="except-first:2") == "oelm-core (layers=except-first:2)"
    assert label(preset="identity-key", k={"scale": 4.0}) == "identity-key (k.scale=4.0)"


def test_benchmark_files_are_read_and_malformed_ones_are_named(tmp_path):
    language_run(tmp_path / "runs")
    row = bench_row()
    (tmp_path / "bench.json").write_text(json.dumps([row]))
    (tmp_path / "other.json").write_text("[1, 2]")
    for name, value in (("ratio", "fast"), ("ratio_95", "wide"), ("step_ms", "long"), ("batch_size", None)):
        (tmp_path / f"{name}.json").write_text(json.dumps([{**row, name: value}]))
    loaded = load_runs([tmp_path])
    assert [bench.path.name for bench in loaded.benches] == ["bench.json"]
    malformed = ["batch_size.json", "ratio.json", "ratio_95.json", "step_ms.json"]
    assert [Path(problem.split(": ")[0]).name for problem in loaded.problems] == malformed
