"""Preparing a corpus is interrupted at any point, partly in real processes: the result is complete and the same."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from oelm.data import DataError, TokenDataset, prepare
from oelm.data.corpus.workspace import workspace
from tests.support.corpus import content, documents, gpt2_folder, write_corpus

SLOW = """
import sys, time
from oelm.data import prepare
from oelm.data.corpus import encode
encode._JOB = 2000
def show(report):
    if report.stage == "encode":
        print(report.tokens, flush=True)
        time.sleep(0.02)
prepare(sys.argv[1], sys.argv[2], sys.argv[3], val_fraction=0.1, checkpoint_bytes=8000, workers=2, progress=show)
"""


@pytest.fixture
def gpt2(tmp_path):
    return gpt2_folder(tmp_path / "gpt2")


def test_a_preparation_continues_after_its_process_was_killed(tmp_path, gpt2):
    corpus = write_corpus(tmp_path / "a.txt", documents(600))
    out = tmp_path / "out"
    prepare(corpus, tmp_path / "whole", gpt2, val_fraction=0.1)
    saved_tokens = 0
    for _ in range(2):  # killed twice: a continued preparation can be continued as well
        process = subprocess.Popen(
            [sys.executable, "-c", SLOW, str(corpus), str(out), str(gpt2)], stdout=subprocess.PIPE, text=True
        )
        for line in process.stdout:
            if int(line) > saved_tokens + 20_000:
                break
        process.send_signal(signal.SIGKILL)
        process.wait()
        with pytest.raises(DataError, match="did not finish"):
            TokenDataset.open(out)
        checkpoint = json.loads((out / ".preparing" / "checkpoint.json").read_text())
        assert sum(tokens for tokens, _ in checkpoint["parts"].values()) > saved_tokens
        saved_tokens = sum(tokens for tokens, _ in checkpoint["parts"].values())
        with (out / ".preparing" / "train.bin").open("ab") as file:
            file.write(b"\xff" * 999)  # as if more had reached the disk after the checkpoint
    encoded_tokens = []
    prepare(
        corpus,
        out,
        gpt2,
        val_fraction=0.1,
        progress=lambda report: report.stage == "encode" and encoded_tokens.append(report.tokens),
    )
    assert encoded_tokens[0] > saved_tokens, "finished text was encoded again"
    assert content(out) == content(tmp_path / "whole")


class Interruption(BaseException):
    """Interrupts a preparation, like Ctrl-C."""


@pytest.mark.parametrize("kind", ["documents", "stream", "validation file", "bpe"])
def test_many_interruptions_do_not_change_the_result(tmp_path, gpt2, monkeypatch, kind):
    monkeypatch.setattr("oelm.data.corpus.encode._JOB", 3000)
    monkeypatch.setattr("oelm.data.corpus.encode._PIECE", 500)
    monkeypatch.setattr("oelm.data.corpus.readers._BLOCK", 2000)
    corpus = write_corpus(tmp_path / "a.txt", documents(100))
    if kind == "stream":
        corpus.write_text("\n\n".join(documents(100)))
    options = {"train_bpe": 300} if kind == "bpe" else {"tokenizer": gpt2}
    if kind == "validation file":
        options["val"] = write_corpus(tmp_path / "val.txt", [*documents(20, seed=3), *documents(4)])
    else:
        options["val_fraction"] = 0.2
    prepare(corpus, tmp_path / "whole", **options)
    interruptions = 0
    while True:
        reports = 0

        def interrupt(report):
            nonlocal reports
            reports += report.stage == "encode"
            if reports == 3:
                raise Interruption

        try:
            prepare(corpus, tmp_path / "out", **options, workers=2, checkpoint_bytes=1, progress=interrupt)
            break
        except Interruption:
            interruptions += 1
    assert interruptions > 5
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_a_process_that_dies_after_the_last_move_leaves_a_dataset(tmp_path, gpt2, monkeypatch):
    corpus = write_corpus(tmp_path / "a.txt", documents(60))
    prepare(corpus, tmp_path / "whole", gpt2, val_fraction=0.2)
    with monkeypatch.context() as patch:
        patch.setattr("oelm.data.corpus.workspace.shutil.rmtree", lambda path: (_ for _ in ()).throw(Interruption))
        with pytest.raises(Interruption):
            prepare(corpus, tmp_path / "out", gpt2, val_fraction=0.2)
    assert (tmp_path / "out" / ".preparing").is_dir()
    TokenDataset.open(tmp_path / "out").verify()
    prepare(corpus, tmp_path / "out", gpt2, val_fraction=0.2)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


@pytest.mark.parametrize("moved_before", range(4))
def test_an_interruption_while_files_are_moved_is_recovered(tmp_path, gpt2, monkeypatch, moved_before):
    corpus = write_corpus(tmp_path / "a.txt", documents(60))
    prepare(corpus, tmp_path / "whole", gpt2, val_fraction=0.2)
    out = tmp_path / "out"
    original_replace, moves = Path.replace, 0

    def replace(self, target):
        nonlocal moves
        if Path(target).parent == out:
            if moves == moved_before:
                raise Interruption
            moves += 1
        return original_replace(self, target)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", replace)
        with pytest.raises(Interruption):
            prepare(corpus, out, gpt2, val_fraction=0.2)
    with pytest.raises(DataError, match="did not finish"):
        TokenDataset.open(out)
    # Another recipe starts over and removes everything of the first one.
    if moved_before == 2:
        prepare(corpus, out, gpt2, val_fraction=0)
        assert "val.bin" not in content(out)
        return
    prepare(corpus, out, gpt2, val_fraction=0.2)
    assert content(out) == content(tmp_path / "whole")


def test_a_changed_recipe_starts_over(tmp_path, gpt2, monkeypatch):
    monkeypatch.setattr("oelm.data.corpus.encode._JOB", 3000)
    corpus = write_corpus(tmp_path / "a.txt", documents(100))

    def interrupt(report):
        if report.tokens > 3000:
            raise Interruption

    with pytest.raises(Interruption):
        prepare(corpus, tmp_path / "out", gpt2, val_fraction=0.2, checkpoint_bytes=1, progress=interrupt)
    assert (tmp_path / "out" / ".preparing").is_dir()
    write_corpus(corpus, documents(90))
    prepare(corpus, tmp_path / "out", gpt2, val_fraction=0.2)
    prepare(corpus, tmp_path / "whole", gpt2, val_fraction=0.2)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_bad_input_late_in_the_corpus_leaves_a_folder_that_does_not_open(tmp_path, gpt2, monkeypatch):
    monkeypatch.setattr("oelm.data.corpus.encode._JOB", 1000)
    path = tmp_path / "a.jsonl"
    good = [json.dumps({"text": text}) for text in documents(30)]
    path.write_text("\n".join([*good, "{oops"]))
    with pytest.raises(DataError, match="line 31: not JSON"):
        prepare(path, tmp_path / "out", gpt2, val_fraction=0, checkpoint_bytes=1000)
    with pytest.raises(DataError, match="did not finish"):
        TokenDataset.open(tmp_path / "out")
    path.write_text("\n".join(good))
    assert prepare(path, tmp_path / "out", gpt2, val_fraction=0).train.documents == 30


def test_two_processes_cannot_prepare_one_folder(tmp_path, gpt2):
    corpus = write_corpus(tmp_path / "a.txt", documents(60))
    with workspace(tmp_path / "out", {}):
        with pytest.raises(DataError, match="another process is preparing this folder"):
            prepare(corpus, tmp_path / "out", gpt2)
        assert (tmp_path / "out" / ".preparing").is_dir()
    assert not (tmp_path / "out").exists()


def test_a_file_size_limit_is_explained(tmp_path, gpt2):
    corpus = write_corpus(tmp_path / "a.txt", documents(300))
    code = (
        "import resource, sys; from oelm import FileError; from oelm.data import prepare\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))\n"
        "try: prepare(*sys.argv[1:4], val_fraction=0)\n"
        "except FileError as error: print(error)"
    )
    arguments = [sys.executable, "-c", code, str(corpus), str(tmp_path / "out"), str(gpt2)]
    result = subprocess.run(arguments, capture_output=True, text=True, check=True)
    assert "file size limit" in result.stdout
    assert not (tmp_path / "out").exists()


MEMORY = """
import resource, sys
from oelm.data import prepare
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
prepare(sys.argv[1], sys.argv[3] + "1", sys.argv[4], val_fraction=0.01, workers=2)
before = peak()
prepare(sys.argv[2], sys.argv[3] + "2", sys.argv[4], val_fraction=0.01, workers=2)
print(before, peak())
"""


def _memory_growth(tmp_path: Path, tokenizer: Path, size: int) -> int:
    """Return how many megabytes more a corpus of `size` bytes needs in memory than one that is 20 times smaller."""
    block = "".join(f"{text}\n<|endoftext|>\n" for text in documents(500)).encode()
    for name, length in (("small", size // 20), ("large", size)):
        with (tmp_path / f"{name}.txt").open("wb") as file:
            for index in range(length // len(block) + 1):
                file.write(b"%d " % index + block)
    paths = [str(tmp_path / name) for name in ("small.txt", "large.txt", "out")]
    result = subprocess.run(
        [sys.executable, "-c", MEMORY, *paths, str(tokenizer)], capture_output=True, text=True, check=True
    )
    before, after = map(int, result.stdout.split())
    return after - before


@pytest.mark.full
def test_memory_does_not_grow_with_the_corpus(tmp_path):
    """Prepare 200 MB with a tokenizer that makes one token of a document, to measure reading and writing alone."""
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"<unk>": 0, "<|endoftext|>": 1}, "<unk>"))
    (tmp_path / "words").mkdir()
    backend.save(str(tmp_path / "words" / "tokenizer.json"))
    assert _memory_growth(tmp_path, tmp_path / "words", 200_000_000) < 30


@pytest.mark.slow
def test_memory_does_not_grow_with_a_real_tokenizer(tmp_path, gpt2):
    assert _memory_growth(tmp_path, gpt2, 200_000_000) < 60


def test_preparing_does_not_change_the_environment(tmp_path, gpt2, monkeypatch):
    corpus = write_corpus(tmp_path / "a.txt", documents(30))
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "true")
    prepare(corpus, tmp_path / "1", gpt2, val_fraction=0)
    assert os.environ["TOKENIZERS_PARALLELISM"] == "true"
    monkeypatch.delenv("TOKENIZERS_PARALLELISM")
    prepare(corpus, tmp_path / "2", gpt2, val_fraction=0)
    assert "TOKENIZERS_PARALLELISM" not in os.environ
