"""Tables of runs in a terminal: status, and the live view of a matrix."""

import io

import pytest
from rich.console import Console

from oelm.cli.run_tables import MatrixView, event_line, status_table, status_text, watch
from oelm.lab.matrix import Matrix, MatrixEvent
from oelm.lab.status import RunState, list_runs, read_state
from tests.support.lab import ForkLauncher, plan
from tests.support.records import write_status


def terminal() -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=160, height=40)


def test_a_terminal_shows_events_and_a_live_table(tmp_path):
    planned = plan(tmp_path, axes={"seed": [0, 1]})
    console = terminal()
    with MatrixView(console, pause=0.0) as view:
        Matrix(planned, ForkLauncher(), notify=view.print_event).run(view.show)
    shown = console.file.getvalue()
    for text in ("started  study/baseline/seed-0", "tokens/s", "2 finished", "so far"):
        assert text in shown


def test_a_narrow_terminal_folds_events_between_words(tmp_path):
    planned = plan(tmp_path, axes={"seed": [0]})
    console = Console(file=io.StringIO(), force_terminal=True, width=50, height=40, color_system=None)
    with MatrixView(console, pause=60.0) as view:
        Matrix(planned, ForkLauncher(), notify=view.print_event).run()
    lines = console.file.getvalue().splitlines()
    assert max(map(len, lines)) <= 60, "what is beyond 50 columns are codes that move the cursor"
    assert any(line.startswith("  ") and line.endswith("[1/1]") for line in lines), lines


def test_a_matrix_without_runs_in_progress_stops_none():
    words = {count: event_line(MatrixEvent("stopping", "out of time", {}, None, count)) for count in (0, 2)}
    assert words == {0: "out of time", 2: "out of time: saving and stopping 2 runs"}


def test_the_cursor_stays_visible_during_the_live_view():
    console = terminal()
    with MatrixView(console):
        shown = console.file.getvalue()
    assert shown.rfind("\x1b[?25h") > shown.rfind("\x1b[?25l") >= 0


def test_the_status_table_shows_error_messages(tmp_path):
    write_status(tmp_path, "failed", message="TrainingError: loss is [nan]")
    console = terminal()
    console.print(status_table([read_state(tmp_path, "x")]))
    assert "x: TrainingError: loss is [nan]" in console.file.getvalue()


@pytest.mark.parametrize(
    ("width", "dropped"), [(130, []), (80, ["GPU memory", "host"]), (60, ["tokens/s", "train loss"])]
)
def test_a_narrow_terminal_drops_columns_and_keeps_words_whole(width, dropped, tmp_path):
    figures = {"step": 100000, "max_steps": 100000, "loss": 6.2354, "val_loss": 6.2573, "perplexity": 521.79}
    name = "GPT-02-lr-1e-3/oelm-random-matched/seed-10"
    run = RunState(name=name, path=tmp_path, state="finished", **figures, tokens_per_second=20521)
    console = terminal()
    console.width = width
    console.print(status_table([run], width))
    shown = console.file.getvalue()
    for word in ("finished", "100000/100000", "521.79"):
        assert word in shown
    assert all(name not in shown for name in dropped)


def test_a_long_name_is_folded_at_its_slashes(tmp_path):
    figures = {"step": 146, "max_steps": 1800, "loss": 1.7194, "val_loss": 1.7615, "perplexity": 5.82}
    run = RunState(name="demo/oelm-nofreeze/seed-0", path=tmp_path, state="stopped", **figures)
    first, second = [line.split() for line in status_text([run], 80).splitlines()[1:3]]
    assert (first[:2], second) == (["demo/oelm-nofreeze/", "stopped"], ["seed-0"])


def test_the_accuracy_on_other_splits_is_shown_where_a_run_has_one(tmp_path):
    labelled = RunState(name="a", path=tmp_path, state="finished", accuracy=0.9, split_accuracy={"test": 0.875})
    language = RunState(name="b", path=tmp_path, state="finished", perplexity=4.2)
    assert "test 87.50%" in status_text([labelled, language], 80)
    assert "other acc" in status_text([labelled, language])
    assert "other acc" not in status_text([language]), "a column that no run needs is left out"


def test_watching_ends_when_no_run_is_in_progress(tmp_path):
    states = ["waiting", "running", "finished"]
    readings = [[RunState(name="study/x", path=tmp_path, state=state)] for state in states]
    watch(lambda: readings.pop(0), seconds=0)
    assert readings == []  # a fourth reading would raise


def test_watching_a_folder_without_runs_ends_at_once(tmp_path):
    readings = []
    watch(lambda: readings.append(0) or list_runs(tmp_path), seconds=60)
    assert readings == [0]
