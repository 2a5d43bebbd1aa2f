"""Preparing a corpus: the tokens are right, the splits share no text, the result depends on the input alone."""

import errno
import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from oelm.cli.app import app
from oelm.data import DataError, Progress, TokenDataset, prepare, stories
from oelm.data.corpus.workspace import Part
from oelm.data.tokenizer import load_tokenizer
from oelm.data.tokenizer import train_bpe as train_tokenizer
from oelm.errors import FileError
from tests.data.corpus.test_sources import StandInHub
from tests.support.corpus import SEPARATOR, content, documents, gpt2_folder, write_corpus


@pytest.fixture
def gpt2(tmp_path):
    return gpt2_folder(tmp_path / "gpt2")


def texts_of(data: TokenDataset, split: str) -> list[str]:
    tokens = getattr(data, split).tokens.tolist()
    return data.load_tokenizer().decode(tokens).split(SEPARATOR)[:-1]


def command(*arguments: object):
    return CliRunner().invoke(app, ["data", "prepare", *map(str, arguments)])


def test_the_tokens_equal_those_of_the_tokenizer_alone(tmp_path, gpt2):
    texts = [*documents(30), "ünïcödé ☃ 日本語", " leading and trailing ", "tabs\tand\n\nlines"]
    data = prepare(write_corpus(tmp_path / "a.txt", texts), tmp_path / "out", gpt2, val_fraction=0)
    tokenizer = load_tokenizer(gpt2)
    expected = [token for text in texts for token in (*tokenizer.backend.encode(text).ids, tokenizer.eos_id)]
    assert data.train.tokens.tolist() == expected
    assert data.val is None
    assert data.train.bytes == sum(len(text.encode()) for text in texts)
    assert (data.train.documents, data.vocab_size, data.eos_id) == (len(texts), 600, tokenizer.eos_id)


def test_the_number_of_workers_does_not_change_the_result(tmp_path, gpt2, monkeypatch):
    monkeypatch.setattr("oelm.data.corpus.encode._JOB", 2000)
    corpus = write_corpus(tmp_path / "a.txt", documents(150))
    folders = []
    for workers in (1, 2, 5):
        prepare(corpus, tmp_path / f"out{workers}", gpt2, val_fraction=0.1, workers=workers)
        folders.append(content(tmp_path / f"out{workers}"))
    assert folders[0] == folders[1] == folders[2]
    assert set(folders[0]) == {
        "train.bin", "val.bin", "data.json", "tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json"
    }  # fmt: skip


def test_equal_documents_are_never_in_both_splits(tmp_path, gpt2):
    unique = documents(300)
    texts = unique + unique[:100] + [f"\n{text}\n" for text in unique[:50]]
    random.Random(0).shuffle(texts)
    data = prepare(write_corpus(tmp_path / "a.txt", texts), tmp_path / "out", gpt2, val_fraction=0.2)
    train, val = texts_of(data, "train"), texts_of(data, "val")
    assert not set(train) & set(val)
    assert set(train) | set(val) == set(unique)
    assert len(train) + len(val) == 450
    assert 0.1 < len(set(val)) / 300 < 0.3


def test_the_split_depends_on_content_and_seed_but_not_on_order(tmp_path, gpt2):
    texts = documents(120)
    in_order = prepare(write_corpus(tmp_path / "a.txt", texts), tmp_path / "1", gpt2, val_fraction=0.2)
    reversed_order = prepare(write_corpus(tmp_path / "b.txt", texts[::-1]), tmp_path / "2", gpt2, val_fraction=0.2)
    other_seed = prepare(tmp_path / "a.txt", tmp_path / "3", gpt2, val_fraction=0.2, seed=1)
    larger = prepare(tmp_path / "a.txt", tmp_path / "4", gpt2, val_fraction=0.4)
    assert set(texts_of(in_order, "val")) == set(texts_of(reversed_order, "val")) != set(texts_of(other_seed, "val"))
    assert set(texts_of(in_order, "val")) < set(texts_of(larger, "val"))


def test_a_validation_file_is_used_in_full_and_shared_documents_are_counted(tmp_path, gpt2):
    train = write_corpus(tmp_path / "train.txt", documents(40))
    val = write_corpus(tmp_path / "val.txt", [*documents(10, seed=5), *documents(3)])
    data = prepare(train, tmp_path / "out", gpt2, val=val)
    assert texts_of(data, "train") == documents(40)
    assert texts_of(data, "val") == [*documents(10, seed=5), *documents(3)]
    assert data.shared_documents == 3
    header = json.loads((tmp_path / "out" / "data.json").read_text())
    assert [(source["name"], source["split"]) for source in header["sources"]] == [
        ("train.txt", "train"),
        ("val.txt", "val"),
    ]


@pytest.mark.parametrize("separator", [SEPARATOR, "\n\n"], ids=["documents", "running text"])
@pytest.mark.parametrize("tokenizer_from", ["tokenizer", "bpe"])
def test_validation_text_that_is_all_training_text_is_refused(tmp_path, gpt2, tokenizer_from, separator):
    # Running text is read in blocks of 8,192 characters.
    (tmp_path / "a.txt").write_text(separator.join(documents(200)))
    tokenizer_option = {"tokenizer": gpt2} if tokenizer_from == "tokenizer" else {"train_bpe": 300}
    with pytest.raises(DataError, match=r"a.txt: every document .*also in the training text"):
        prepare(tmp_path / "a.txt", tmp_path / "out", val=tmp_path / "a.txt", **tokenizer_option)
    assert not (tmp_path / "out").exists()


def test_a_test_file_is_used_in_full_and_shared_documents_are_counted(tmp_path, gpt2):
    train, val, test = documents(40), documents(46)[40:], documents(60)[46:]
    files = [
        write_corpus(tmp_path / "train.txt", train),
        write_corpus(tmp_path / "val.txt", val),
        write_corpus(tmp_path / "test.txt", [*test, train[3], train[3], val[0]]),
    ]
    data = prepare(files[0], tmp_path / "out", gpt2, val=files[1], test=files[2])
    assert texts_of(data, "test") == [*test, train[3], train[3], val[0]]
    assert (texts_of(data, "train"), texts_of(data, "val")) == (train, val)
    assert (data.shared_documents, data.shared_test_documents) == (0, 3)
    assert data.overlap == "3 of 17 test documents are also in the training or validation text"
    without = prepare(files[0], tmp_path / "without", gpt2, val=files[1])
    assert without.test is None
    assert without.train.sha256 == data.train.sha256
    assert without.sha256 != data.sha256


def test_a_test_file_goes_with_validation_text_cut_from_the_corpus(tmp_path, gpt2):
    corpus, test = write_corpus(tmp_path / "a.txt", documents(80)), write_corpus(tmp_path / "test.txt", ["one", "two"])
    with_test = prepare(corpus, tmp_path / "with", gpt2, val_fraction=0.2, test=test)
    without = prepare(corpus, tmp_path / "without", gpt2, val_fraction=0.2)
    assert texts_of(with_test, "test") == ["one", "two"]
    assert with_test.val.sha256 == without.val.sha256


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (documents(5), "test.txt: every document of the test text is also in the training"),
        ([" "], "test source is empty"),
    ],
)
def test_test_text_that_cannot_judge_is_refused(tmp_path, gpt2, texts, message):
    corpus, test = write_corpus(tmp_path / "a.txt", documents(20)), write_corpus(tmp_path / "test.txt", texts)
    with pytest.raises(DataError, match=message):
        prepare(corpus, tmp_path / "out", gpt2, val_fraction=0, test=test)
    assert not (tmp_path / "out" / "data.json").exists()


def test_shared_documents_are_counted_once_per_validation_document(tmp_path, gpt2):
    train = write_corpus(tmp_path / "train.txt", documents(20) * 3)
    val = write_corpus(tmp_path / "val.txt", [*documents(10, seed=5), *documents(3), documents(1)[0]])
    assert prepare(train, tmp_path / "out", gpt2, val=val).shared_documents == 4
    other_val = write_corpus(tmp_path / "alone.txt", documents(10, seed=5))
    data = prepare(train, tmp_path / "alone", gpt2, val=other_val)
    assert (data.shared_documents, data.overlap) == (0, "")
    for message in ("wrote", "already holds this data"):
        result = command(train, "--val", val, "--tokenizer", gpt2, "--out", tmp_path / "c")
        assert message in result.stdout
        (warning,) = [line for line in result.stderr.splitlines() if line.startswith("warning: ")]
        assert "4 of 14 validation documents" in warning


def test_text_without_separators_is_split_at_blank_lines(tmp_path, gpt2):
    paragraphs = [text + "\n\n" for text in documents(400)]
    (tmp_path / "a.txt").write_text("".join(paragraphs))
    data = prepare(tmp_path / "a.txt", tmp_path / "out", gpt2, val_fraction=0.2)
    train, val = texts_of(data, "train"), texts_of(data, "val")
    assert data.train.bytes + data.val.bytes == (tmp_path / "a.txt").stat().st_size
    # The documents are stretches of the file in order, each with one end-of-text token; no paragraph is cut.
    assert sum(len(text) for text in train + val) == data.train.bytes + data.val.bytes
    parts = [part + "\n\n" for text in train + val for part in text.split("\n\n")[:-1]]
    assert sorted(parts) == sorted(paragraphs)
    assert 2 < len(train) < 60
    whole = prepare(tmp_path / "a.txt", tmp_path / "whole", gpt2, val_fraction=0)
    assert texts_of(whole, "train") == ["".join(paragraphs)]
    assert whole.train.tokens.tolist()[:-1] == load_tokenizer(gpt2).backend.encode("".join(paragraphs)).ids


def test_a_bpe_is_trained_on_the_training_split_alone(tmp_path):
    texts = documents(200)
    data = prepare(write_corpus(tmp_path / "a.txt", texts), tmp_path / "out", train_bpe=500, val_fraction=0.2)
    train = texts_of(data, "train")
    assert 0 < len(train) < 200
    assert data.tokenizer_hash == train_tokenizer(iter(train), 500).sha256
    assert data.vocab_size == 500
    again = prepare(tmp_path / "a.txt", tmp_path / "again", train_bpe=500, val_fraction=0.2)
    assert content(tmp_path / "out") == content(tmp_path / "again")
    assert again.sha256 == data.sha256


def test_reading_stops_at_a_limit_of_bytes(tmp_path, gpt2):
    texts = documents(100)
    data = prepare(write_corpus(tmp_path / "a.txt", texts), tmp_path / "out", gpt2, val_fraction=0, limit_bytes=5000)
    documents_read = texts_of(data, "train")
    assert documents_read == texts[: len(documents_read)]
    assert sum(map(len, documents_read[:-1])) < 5000 <= data.train.bytes


def test_the_same_call_again_only_opens_the_dataset(tmp_path, gpt2):
    corpus = write_corpus(tmp_path / "a.txt", documents(50))
    first = prepare(corpus, tmp_path / "out", gpt2, val_fraction=0.2)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    again = prepare(corpus, tmp_path / "out", gpt2, val_fraction=0.2, workers=1)
    assert again.sha256 == first.sha256
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before


def test_the_command_reports_whether_it_wrote_the_data_or_it_existed(tmp_path):
    corpus = write_corpus(tmp_path / "a.txt", list(stories(1, 60)))
    arguments = (corpus, "--train-bpe", 300, "--val-fraction", 0.2, "--out", tmp_path / "out")
    first, again = (command(*arguments) for _ in range(2))
    data = TokenDataset.open(tmp_path / "out")
    for output in (first.stdout, again.stdout):
        for part in (str(tmp_path / "out"), f"{len(data.train):,} tokens", f"{len(data.val):,}", "300"):
            assert part in output
    assert first.stdout.startswith("wrote ")
    assert "wrote" not in again.stdout


def test_the_command_says_how_much_text_is_held_out(tmp_path):
    corpus, test = write_corpus(tmp_path / "a.txt", documents(60)), write_corpus(tmp_path / "test.txt", ["one two"])
    result = command(corpus, "--train-bpe", 300, "--val-fraction", 0.2, "--test", test, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert re.search(r"tokens for training, [\d,]+ for validation and \d+ for\s+test, vocabulary", result.stdout)


def test_the_command_explains_a_vocabulary_smaller_than_requested(tmp_path):
    corpus = write_corpus(tmp_path / "a.txt", documents(20))
    result = command(corpus, "--train-bpe", 8192, "--val-fraction", 0, "--out", tmp_path / "out")
    size = TokenDataset.open(tmp_path / "out").vocab_size
    assert size < 8192
    assert f"vocabulary {size:,} (not 8,192" in result.stdout


def test_another_recipe_for_the_same_folder_is_refused(tmp_path, gpt2):
    corpus = write_corpus(tmp_path / "a.txt", documents(50))
    prepare(corpus, tmp_path / "out", gpt2, val_fraction=0.2)
    before = content(tmp_path / "out")
    with pytest.raises(DataError, match=r"val_fraction: 0\.2 there, 0\.3 now"):
        prepare(corpus, tmp_path / "out", gpt2, val_fraction=0.3)
    with pytest.raises(DataError, match=r"tokenizer: .* there, None now; train_bpe: None there, 300 now"):
        prepare(corpus, tmp_path / "out", train_bpe=300, val_fraction=0.2)
    write_corpus(corpus, documents(51))
    with pytest.raises(DataError, match=r"sources: the content of a\.txt has changed"):
        prepare(corpus, tmp_path / "out", gpt2, val_fraction=0.2)
    assert content(tmp_path / "out") == before


def test_folders_with_other_files_are_not_touched(tmp_path, gpt2):
    corpus = write_corpus(tmp_path / "a.txt", documents(50))
    folder = tmp_path / "thesis"
    folder.mkdir()
    (folder / "thesis.tex").write_text("precious")
    with pytest.raises(DataError, match=r"thesis: .*thesis\.tex"):
        prepare(corpus, folder, gpt2)
    with pytest.raises(DataError, match="a file of that name exists"):
        prepare(corpus, corpus, gpt2)
    assert content(folder) == {"thesis.tex": b"precious"}


def test_a_damaged_result_is_not_reused(tmp_path, gpt2):
    corpus = write_corpus(tmp_path / "a.txt", documents(50))
    prepare(corpus, tmp_path / "out", gpt2, val_fraction=0.2)
    (tmp_path / "out" / "train.bin").write_bytes(b"")
    with pytest.raises(DataError, match=r"train.bin: truncated.*delete .*out first"):
        prepare(corpus, tmp_path / "out", gpt2, val_fraction=0.2)


@pytest.mark.parametrize("text", ["", " \n\n \n", f"\n{SEPARATOR}\n{SEPARATOR}\n"])
@pytest.mark.parametrize("tokenizer_from", ["tokenizer", "bpe"])
def test_an_empty_corpus_is_refused_and_leaves_nothing(tmp_path, gpt2, text, tokenizer_from):
    (tmp_path / "a.txt").write_text(text)
    tokenizer_option = {"tokenizer": gpt2} if tokenizer_from == "tokenizer" else {"train_bpe": 300}
    with pytest.raises(DataError, match=r"a.txt: the corpus is empty"):
        prepare(tmp_path / "a.txt", tmp_path / "deep" / "out", **tokenizer_option)
    assert not (tmp_path / "deep").exists()


def test_the_error_for_a_fraction_without_validation_text_gives_one_that_suffices(tmp_path, gpt2):
    corpus = write_corpus(tmp_path / "a.txt", documents(8))
    with pytest.raises(DataError, match=r"val_fraction 0\.0001 \(--val-fraction\)") as error:
        prepare(corpus, tmp_path / "out", gpt2, val_fraction=0.0001)
    assert not (tmp_path / "out").exists()
    sufficient = float(str(error.value).split("above ")[1].split()[0]) + 0.0001
    assert prepare(corpus, tmp_path / "out", gpt2, val_fraction=sufficient).val.documents == 1
    with pytest.raises(DataError, match="every document is for validation"):
        prepare(corpus, tmp_path / "all", gpt2, val_fraction=0.9999)
    (tmp_path / "val.txt").write_text("")
    with pytest.raises(DataError, match=r"val.txt: the validation source is empty"):
        prepare(corpus, tmp_path / "none", gpt2, val=tmp_path / "val.txt")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"val_fraction": 1.0}, r"val_fraction 1.0 \(--val-fraction\).* below 1"),
        ({"seed": -1}, "seed -1"),
        ({"workers": 0}, "workers 0"),
        ({"limit_bytes": 0}, "limit_bytes 0"),
        ({"train_bpe": 300}, "two tokenizers: .*tokenizer .* train_bpe"),
        ({"tokenizer": None}, "no tokenizer: .*--tokenizer.*--train-bpe"),
        ({"tokenizer": None, "train_bpe": 100}, "at least 257"),
        (
            {"tokenizer": None, "train_bpe": 70_000, "dtype": "uint16"},
            "65,536.*70,000",
        ),
        ({"dtype": "int8"}, "dtype 'int8'"),
        ({"eos": "<none>"}, "no token '<none>'"),
        ({"source": "missing.txt"}, r"missing.txt: no such file"),
    ],
)
def test_bad_arguments_are_refused_before_anything_is_written(tmp_path, gpt2, arguments, message):
    corpus = write_corpus(tmp_path / "a.txt", documents(5))
    with pytest.raises(DataError, match=message):
        prepare(**({"source": corpus, "out": tmp_path / "out", "tokenizer": gpt2} | arguments))
    assert not (tmp_path / "out").exists()


def test_ids_are_stored_as_uint32_on_request(tmp_path, gpt2):
    corpus = write_corpus(tmp_path / "a.txt", documents(20))
    wide = prepare(corpus, tmp_path / "wide", gpt2, val_fraction=0, dtype="uint32")
    narrow = prepare(corpus, tmp_path / "narrow", gpt2, val_fraction=0)
    assert wide.train.tokens.dtype == np.dtype("<u4")
    assert np.array_equal(wide.train.tokens, narrow.train.tokens)


def test_a_hub_dataset_is_prepared_with_its_validation_split(tmp_path, gpt2, monkeypatch):
    rows = {"train": [{"text": text} for text in documents(30)], "validation": [{"text": "held out"}]}
    monkeypatch.setitem(sys.modules, "datasets", StandInHub(rows))
    data = prepare("tinystories", tmp_path / "out", gpt2, synthetic=True, description="a stand-in")
    assert texts_of(data, "train") == documents(30)
    assert texts_of(data, "val") == ["held out"]
    assert (data.synthetic, data.description) == (True, "a stand-in")
    header = json.loads((tmp_path / "out" / "data.json").read_text())
    assert [source["name"] for source in header["sources"]] == [
        "roneneldan/TinyStories (train)",
        "roneneldan/TinyStories (validation)",
    ]


def test_progress_is_reported(tmp_path, gpt2, monkeypatch, capsys):
    monkeypatch.setattr("oelm.data.corpus.encode._JOB", 5000)
    corpus = write_corpus(tmp_path / "a.txt", documents(80))
    reports: list[Progress] = []
    data = prepare(corpus, tmp_path / "out", train_bpe=300, val_fraction=0.2, progress=reports.append)
    assert list(dict.fromkeys(report.stage for report in reports)) == ["hash", "train tokenizer", "encode"]
    size = corpus.stat().st_size
    for stage in ("hash", "train tokenizer", "encode"):
        read = [report.bytes for report in reports if report.stage == stage]
        assert read == sorted(read)
        assert read[-1] == size
    assert all(report.total == size for report in reports)
    assert (reports[-1].documents, reports[-1].tokens) == (80, len(data.train) + len(data.val))
    prepare(corpus, tmp_path / "bar", gpt2, val_fraction=0.2, progress=True)
    captured = capsys.readouterr()
    assert "encode" in captured.err
    assert "29.6 k tokens" in captured.err
    assert captured.out == ""


@pytest.mark.parametrize(
    ("code", "message"),
    [(errno.ENOSPC, "free some space"), (errno.EROFS, "not writable")],
)
def test_a_full_or_read_only_disk_is_explained_and_leaves_no_files(tmp_path, gpt2, monkeypatch, code, message):
    def fail(self, ids):
        raise OSError(code, "no")

    monkeypatch.setattr(Part, "append", fail)
    corpus = write_corpus(tmp_path / "a.txt", documents(30))
    with pytest.raises(FileError, match=message):
        prepare(corpus, tmp_path / "out", gpt2, val_fraction=0)
    assert not (tmp_path / "out").exists()


def test_a_folder_that_cannot_be_created_is_explained(tmp_path, gpt2, monkeypatch):
    corpus = write_corpus(tmp_path / "a.txt", documents(30))

    def fail(self, *arguments, **options):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(Path, "mkdir", fail)
    with pytest.raises(FileError, match=r"out: .*Read-only file system.* not writable"):
        prepare(corpus, tmp_path / "out", gpt2)


def test_ignored_files_are_recorded(tmp_path, gpt2):
    (tmp_path / "corpus").mkdir()
    write_corpus(tmp_path / "corpus" / "a.txt", documents(30))
    (tmp_path / "corpus" / "README.md").write_text("about")
    prepare(tmp_path / "corpus", tmp_path / "out", gpt2, val_fraction=0)
    assert json.loads((tmp_path / "out" / "data.json").read_text())["ignored"] == ["README.md"]
