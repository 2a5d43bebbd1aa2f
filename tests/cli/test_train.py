"""`oelm train` in a terminal of 80 columns, and without a config file."""

import os
import pty
import re
import signal
import subprocess
import sys
import termios

import pytest

from oelm.base.text import short_count
from oelm.cli.quick_run import quick_config
from oelm.data import stories
from tests.support.lab import lab, refusal, wait_for
from tests.support.training import read, run_to_end, tiny, write_yaml

SMALL = ("model.fields={hidden_size: 48, num_hidden_layers: 1, num_attention_heads: 3}", "train.device=cpu")


class Terminal:
    """A command in a terminal of 80 columns."""

    def __init__(self, folder, *arguments):
        self._terminal, self._other = pty.openpty()
        termios.tcsetwinsize(self._other, (24, 80))
        environment = {**os.environ, "TERM": "xterm", "OMP_NUM_THREADS": "1"}
        environment = {name: value for name, value in environment.items() if name not in ("NO_COLOR", "COLUMNS")}
        command = [sys.executable, "-m", "oelm", *map(str, arguments)]
        ends = {"stdin": self._other, "stdout": self._other, "stderr": self._other}
        self.process = subprocess.Popen(command, **ends, cwd=folder, env=environment, start_new_session=True)
        os.set_blocking(self._terminal, False)
        self._bytes = b""

    @property
    def text(self):
        """Return what was shown so far, without the codes for colours and the cursor."""
        try:
            while chunk := os.read(self._terminal, 65536):
                self._bytes += chunk
        except OSError:  # nothing more to read now, or the other end is closed
            pass
        return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", self._bytes.decode(errors="replace"))

    def end(self):
        self.process.wait(90)
        os.close(self._other)
        return self.text


def test_a_terminal_shows_the_run_and_its_time_left_and_ctrl_c_ends_with_how_to_go_on(tmp_path):
    file = write_yaml(tmp_path / "run.yaml", tiny(tmp_path / "runs", train={"max_steps": 200_000}))
    terminal = Terminal(tmp_path, "train", file.name, "seed=3")
    wait_for(lambda: "left  " in terminal.text)
    os.kill(terminal.process.pid, signal.SIGINT)
    shown = terminal.end()
    assert terminal.process.returncode == 75
    first, *_, last = [line for line in shown.replace("\r", "\n").splitlines() if line.strip()]
    assert re.fullmatch(r"\S+ [kM] parameters, \S+ [kM] trainable; cpu; 200,000 steps, \S+ M tokens, \S+ epochs", first)
    assert last == "to go on from there: python -m oelm train run.yaml seed=3"
    bars = re.findall(r"\d+:\d\d:\d\d left  \d+/200000  loss [\d.]+  ppl [\d.]+  [\d,]+ tok/s", shown)
    assert bars, shown
    assert max(map(len, shown.replace("\r", "\n").splitlines())) <= 80


@pytest.mark.full
def test_the_first_line_counts_the_tokens_of_a_run_that_is_a_small_part_of_an_epoch(tmp_path):
    """Two steps of two sequences of 32 tokens, out of a million: 0.0001 epochs would be 140 tokens."""
    few = {"max_steps": 2, "batch_size": 2}
    data = {"path": "builtin:stories", "sequence_length": 32}
    file = write_yaml(tmp_path / "run.yaml", tiny(tmp_path / "runs", train=few, data=data))
    assert "; cpu; 2 steps, 128 tokens, " in run_to_end("train", file).output


def test_a_terminal_shows_a_warning_of_training_in_whole_words(tmp_path):
    steps = ("train.epochs=null", "train.max_steps=2")
    terminal = Terminal(tmp_path, "finetune", "builtin:sentiment", "--model", "gpt:tiny", *SMALL, *steps)
    lines = [line.rstrip() for line in terminal.end().replace("\r", "\n").splitlines()]
    assert terminal.process.returncode == 0, lines
    assert max(map(len, lines)) <= 80
    assert any(line.startswith("step 2: accuracy") and line.endswith(" (best)") for line in lines), lines
    assert any(line.startswith("warning: accuracy") and line.endswith("always answering") for line in lines), lines


def test_a_terminal_shows_an_error_in_whole_words_and_its_command_in_one_line(tmp_path):
    file = write_yaml(tmp_path / "run.yaml", tiny(tmp_path / "runs"))
    terminal = Terminal(tmp_path, "matrix", file.name)
    lines = terminal.end().split("\r\n")
    assert terminal.process.returncode == 2
    assert max(map(len, lines)) <= 80
    assert any("`oelm train run.yaml`." in line for line in lines)
    assert "such as method: [baseline, oelm-freeze]" in " ".join(lines)


def test_an_error_of_several_lines_is_folded_but_its_code_is_not(tmp_path):
    """Code is indented; the text around it is folded."""
    terminal = Terminal(tmp_path, "run", "GPT-02")
    lines = terminal.end().split("\r\n")
    assert terminal.process.returncode == 2
    assert "    oelm data prepare tinystories --tokenizer gpt2 --out data/tinystories" in lines
    assert max(map(len, lines)) <= 80
    assert "Your own copy: oelm data prepare FILE --tokenizer gpt2 --out DIR, and then" in lines, lines


@pytest.fixture
def prepared(tmp_path, monkeypatch):
    """Prepare a short text in data/mine, and return what the command printed."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("<|endoftext|>".join(stories(seed=0, count=40)))
    options = ("--train-bpe", 400, "--val-fraction", 0.05, "--out", "data/mine")
    result = lab("data", "prepare", "text.txt", *options)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_that_data_prepare_ends_with_trains_on_it_without_a_config_file(prepared, tmp_path):
    command = prepared.splitlines()[-1].removeprefix("next: oelm ")
    assert command == "train --data data/mine --model gpt:tiny method=identity-key"
    arguments = (*command.split(), *SMALL, "train.max_steps=4", "data.sequence_length=16")
    result = lab(*arguments)
    assert result.exit_code == 0, result.output
    assert read(tmp_path / "runs/mine-gpt-tiny/identity-key/seed-0/result.json")["steps"] == 4
    for chosen in ("train.max_steps=4", "train.batch_size=16", "optimizer.learning_rate=0.001", "add KEY=VALUE"):
        assert chosen in result.stderr
    again = lab(*arguments)
    assert "finished already" in again.stderr, "the same command is the same run"


def test_what_is_chosen_depends_on_the_data_and_the_model_and_gives_way_to_overrides(prepared):
    config = quick_config("builtin:stories", None, {}, [])
    assert (config.model.name, config.experiment, config.train.max_steps) == ("gpt:tiny", "stories-gpt-tiny", 1000)
    assert (config.eval.every, config.checkpoint.every, config.data.sequence_length) == (100, 100, 256)
    small = quick_config("data/mine", None, {}, [])
    assert 100 <= small.train.max_steps < 1000
    assert small.data.sequence_length < 256, "a short text is cut into shorter windows"
    longer = quick_config("data/mine", None, {"method": "identity-key"}, ["train.epochs=2", "eval.every=7"])
    assert (longer.train.epochs, longer.train.max_steps, longer.eval.every) == (2, None, 7)
    assert longer.method.name == "identity-key"
    smaller = quick_config("data/mine", None, {}, ["train.batch_size=4"])
    assert smaller.train.max_steps > small.train.max_steps, "three passes take more steps of smaller batches"
    assert quick_config("data/mine", None, {}, ["train.max_steps=20"]).eval.every == 2
    for model, overrides, rate in (
        ("gpt:tiny", [], 1e-3),
        ("some/folder", [], 5e-5),
        ("some/folder", ["model.from_scratch=true"], 1e-3),
        ("some/folder", ["model.from_scratch=true", "optimizer.learning_rate=0.01"], 0.01),
    ):
        assert quick_config("builtin:stories", model, {}, overrides).optimizer.learning_rate == rate


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "name data or a model, as in oelm train --data"),
        (("method=oelm-freeze",), "method=oelm-freeze: the config file comes first"),
        (("--data", "text.txt"), "text.txt: a file, not a folder; prepare the text first: oelm data prepare"),
        (("--data", "nowhere"), "nowhere: no such folder; prepare the text first"),
        (("task=generated:recall", "--data", "nowhere"), "leave out data.path"),
        (("--model", "gpt:tiny", "model.name=gpt:small"), "model.name=gpt:small: an option sets this field too"),
        (("--model", "gpt:tiny", "data.path=data/mine"), "data.path: without a config file, give --data"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("Once upon a time")
    assert message in refusal("train", *arguments).splitlines()[-1]


def test_a_generated_task_is_trained_without_a_config_file_below_the_home_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    small = ("model.fields.hidden_size=32", "model.fields.num_hidden_layers=1", "train.max_steps=2")
    result = lab("train", "task=generated:copying", *small, "--out=~/mine", "--method", "oelm-freeze", "--quiet")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "mine" / "generated-copying" / "oelm-freeze" / "seed-0" / "result.json").is_file()


def test_options_beside_a_config_file_set_its_fields(tmp_path):
    file = write_yaml(tmp_path / "run.yaml", tiny(tmp_path / "ignored", train={"max_steps": 2}))
    result = lab("train", file, "--method", "oelm-freeze", "--out", tmp_path / "a: b", "--quiet")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "a: b" / "run" / "oelm-freeze" / "seed-0" / "result.json").is_file()


def test_large_numbers_are_short():
    counts = (7, 950, 1234, 44_896_768, 999_999, 1_200_000_000)
    assert [short_count(count) for count in counts] == ["7", "950", "1.23 k", "44.9 M", "1 M", "1.2 G"]
