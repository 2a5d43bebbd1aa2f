"""results/corpora.py: lists of what a corpus consists of, by which it is checked and rebuilt; and the list of books."""

import json
import lzma
import subprocess
import sys
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / "results"
DOCUMENTS = ["A first book\nby nobody.", "A second one.\n\nWith two parts.", "ä"]


def corpora(*words, cwd):
    """Run the script; return its exit code and what it printed."""
    command = [sys.executable, str(RESULTS / "corpora.py"), *map(str, words)]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def write_documents(path, documents):
    """Write documents as the corpora here have them, compressed or not by the file's name."""
    text = "".join(f"{document}\n<|endoftext|>\n" for document in documents)
    path.write_bytes(lzma.compress(text.encode()) if path.suffix == ".xz" else text.encode())


def test_a_list_of_documents_tells_the_same_corpus_from_another(tmp_path):
    write_documents(tmp_path / "train.txt.xz", DOCUMENTS)
    assert corpora("list", "train.txt.xz", "--out", "books.tsv", cwd=tmp_path)[0] == 0
    lines = (tmp_path / "books.tsv").read_text().splitlines()
    assert [line.split("\t")[3] for line in lines] == ["A first book by nobody.", "A second one. With two parts.", "ä"]
    assert [int(line.split("\t")[2]) for line in lines] == [len(document.encode()) for document in DOCUMENTS]
    write_documents(tmp_path / "again.txt", DOCUMENTS)
    assert corpora("check", "books.tsv", "again.txt", cwd=tmp_path) == (0, "the same 3, in the same order\n")
    write_documents(tmp_path / "other.txt", [DOCUMENTS[0], DOCUMENTS[2], DOCUMENTS[1]])
    code, text = corpora("check", "books.tsv", "other.txt", cwd=tmp_path)
    assert (code, "number 2 differs" in text) == (1, True)
    write_documents(tmp_path / "fewer.txt", DOCUMENTS[:2])
    assert "the list has 3, the files have 2" in corpora("check", "books.tsv", "fewer.txt", cwd=tmp_path)[1]


def test_the_rows_of_a_part_are_taken_out_of_the_whole_again(tmp_path):
    rows = [f"premise {number}\thypothesis {number}\tneutral" for number in range(9)]
    (tmp_path / "full.tsv").write_text("\n".join(["premise\thypothesis\tlabel", *rows]) + "\n")
    part = "\n".join(["premise\thypothesis\tlabel", rows[7], rows[2], rows[3]]) + "\n"
    (tmp_path / "part.tsv").write_text(part)
    assert corpora("list", "part.tsv", "--out", "rows.tsv.xz", cwd=tmp_path)[0] == 0
    assert corpora("select", "rows.tsv.xz", "full.tsv", "--out", "again.tsv", cwd=tmp_path)[0] == 0
    assert (tmp_path / "again.tsv").read_text() == part
    (tmp_path / "full.tsv").write_text("\n".join(["premise\thypothesis\tlabel", *rows[:5]]) + "\n")
    code, text = corpora("select", "rows.tsv.xz", "full.tsv", "--out", "third.tsv", cwd=tmp_path)
    assert (code, "1 of 3 rows are not there" in text) == (1, True)
    assert not (tmp_path / "third.tsv").exists()


@pytest.mark.parametrize("content", ["no list", "a\tb\tc", "a\t0123456789abcdef\tmany"])
def test_what_is_no_list_is_refused_by_its_line(content, tmp_path):
    (tmp_path / "list.tsv").write_text(content)
    (tmp_path / "text.txt").write_text("text")
    code, text = corpora("check", "list.tsv", "text.txt", cwd=tmp_path)
    assert (code, "list.tsv: line 1 is not one of a list" in text) == (1, True)


def test_the_list_of_the_books_has_the_documents_that_the_records_were_trained_on():
    lines = [line.split("\t") for line in (RESULTS / "corpora/books.tsv").read_text(encoding="utf-8").splitlines()]
    record = RESULTS / "forms-65m/modern-norm-lr-2e-3/baseline/seed-0/environment.json"
    splits = json.loads(record.read_text())["data"]["splits"]
    files = {"train": ("train.txt", "part2.txt", "part3.txt"), "val": ("val.txt",), "test": ("test.txt",)}
    for split, names in files.items():
        assert sum(line[0] in names for line in lines) == splits[split]["documents"]
    assert len({line[1] for line in lines}) == len(lines), "no book is in it twice"
