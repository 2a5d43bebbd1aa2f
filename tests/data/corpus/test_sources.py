"""Every kind of source gives the same documents, and errors about bad input give its location."""

import bz2
import csv
import gzip
import io
import json
import lzma
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from huggingface_hub import constants
from hypothesis import example, given, settings
from hypothesis import strategies as st

from oelm.data import DataError
from oelm.data.corpus import readers
from oelm.data.corpus.encode import cut
from oelm.data.corpus.readers import Reading, read_units, text_units
from oelm.data.corpus.sources import resolve
from oelm.data.text_files import Meter
from oelm.data.tokenizer import load_tokenizer
from tests.support.corpus import SEPARATOR, documents, gpt2_folder, write_corpus

TEXTS = [*documents(5), 'Quoted "text", with commas,\nlines and ünïcödé ☃.', "last"]


def texts(path: Path, **reading) -> list[str]:
    return [unit.text for unit in read_units(path, Reading(**reading), Meter())]


def write_jsonl(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_csv(path: Path, rows: list[dict]) -> Path:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_documents_are_read_from_text_with_separators(tmp_path):
    assert texts(write_corpus(tmp_path / "a.txt", TEXTS)) == TEXTS


def test_documents_are_read_from_jsonl_and_csv(tmp_path):
    rows = [{"id": str(index), "text": text} for index, text in enumerate(TEXTS)]
    assert texts(write_jsonl(tmp_path / "a.jsonl", rows)) == TEXTS
    assert texts(write_csv(tmp_path / "a.csv", rows)) == TEXTS


def test_quotes_in_tsv_are_text(tmp_path):
    (tmp_path / "a.tsv").write_text('sentence\tlabel\n"half a quote\t1\nfine\t0\n')
    assert texts(tmp_path / "a.tsv") == ['"half a quote', "fine"]


@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".xz", lzma.compress), (".bz2", bz2.compress)]
)
def test_documents_are_read_from_compressed_files(tmp_path, suffix, compress):
    plain = write_corpus(tmp_path / "a.txt", TEXTS)
    compressed = tmp_path / f"b.txt{suffix}"
    compressed.write_bytes(compress(plain.read_bytes()))
    assert texts(compressed) == TEXTS
    rows = write_jsonl(tmp_path / "a.jsonl", [{"text": text} for text in TEXTS])
    (tmp_path / f"c.jsonl{suffix}").write_bytes(compress(rows.read_bytes()))
    assert texts(tmp_path / f"c.jsonl{suffix}") == TEXTS


def test_documents_are_read_from_zst_files_and_damaged_ones_are_refused(tmp_path):
    compress = partial(pytest.importorskip("pyarrow").compress, codec="zstd", asbytes=True)
    plain = write_corpus(tmp_path / "a.txt", TEXTS).read_bytes()
    frames = [compress(plain[:500]), compress(plain[500:])]
    (tmp_path / "b.txt.zst").write_bytes(b"".join(frames))
    assert texts(tmp_path / "b.txt.zst") == TEXTS
    (tmp_path / "c.txt.zst").write_bytes(frames[1][: len(frames[1]) // 2])
    with pytest.raises(DataError, match=r"c.txt.zst: the .zst file is damaged"):
        texts(tmp_path / "c.txt.zst")
    (tmp_path / "d.txt.zst").write_bytes(b"this is not zstandard at all")
    with pytest.raises(DataError, match=r"d.txt.zst: the .zst file is damaged"):
        texts(tmp_path / "d.txt.zst")


def test_documents_are_read_from_parquet_and_damaged_files_are_refused(tmp_path):
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = arrow.table({"id": list(range(len(TEXTS))), "content": [*TEXTS[:-1], None]})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    meter = Meter()
    units = list(read_units(tmp_path / "a.parquet", Reading(), meter))
    assert [unit.text for unit in units] == TEXTS[:-1]
    assert meter.bytes == (tmp_path / "a.parquet").stat().st_size
    with pytest.raises(DataError, match="no column 'body'; it has 'id', 'content'"):
        texts(tmp_path / "a.parquet", text_field="body")
    (tmp_path / "b.parquet").write_bytes(b"nonsense" * 10)
    with pytest.raises(DataError, match=r"b.parquet: not a readable Parquet file"):
        texts(tmp_path / "b.parquet")


@pytest.mark.parametrize("name", ["a.txt.zst", "a.parquet"])
def test_a_missing_package_is_named(tmp_path, monkeypatch, name):
    for module in ("pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, module, None)
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(DataError, match="pip install pyarrow"):
        texts(tmp_path / name)


def test_the_text_column_is_detected_or_must_be_named(tmp_path):
    rows = [{"title": "T", "story": "S"}]
    assert texts(write_jsonl(tmp_path / "a.jsonl", rows)) == ["S"]
    assert texts(tmp_path / "a.jsonl", text_field="title") == ["T"]
    assert texts(write_jsonl(tmp_path / "b.jsonl", [{"n": 1, "words": "only text"}])) == ["only text"]
    with pytest.raises(DataError, match=r"'x', 'y'.*--text-field"):
        texts(write_csv(tmp_path / "c.csv", [{"x": "1", "y": "2"}]))
    with pytest.raises(DataError, match=r"c.csv: no column 'text'; it has 'x', 'y'"):
        texts(tmp_path / "c.csv", text_field="text")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"a.jsonl, line 2: not JSON"),
        ("[1]", r"a.jsonl, line 2: a JSON object is expected, not list"),
        ('{"other": "x"}', r"a.jsonl, line 2: no 'text'; it has 'other'"),
        ('{"text": 5}', r"a.jsonl, line 2: 'text' holds int, not text"),
        ('{"text": "a \\ud800 b"}', r"a.jsonl, line 2: 'text' holds half a surrogate pair"),
    ],
)
def test_the_error_about_a_bad_json_line_gives_its_number(tmp_path, line, message):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n' + line + "\n")
    with pytest.raises(DataError, match=message):
        texts(tmp_path / "a.jsonl")


@pytest.mark.parametrize("indent", [None, 2])
def test_an_array_of_json_objects_is_read_object_by_object(tmp_path, monkeypatch, indent):
    monkeypatch.setattr("oelm.data.tables._READ_CHARACTERS", 64)
    stories = [f"story {n}: [ {{ , ]" * (1 + n % 50) for n in range(300)]
    content = json.dumps([{"text": story, "n": n} for n, story in enumerate(stories)], indent=indent)
    (tmp_path / "a.json").write_text("\n " + content + "\n")
    assert texts(tmp_path / "a.json") == stories
    (tmp_path / "empty.json").write_text("[ ]")
    assert texts(tmp_path / "empty.json") == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('[{"text": "a"}, {"text": "b"', r"a.json, object 2: not JSON"),
        ('[{"text": "a"} {"text": "b"}]', r"a.json, object 1: not JSON \(a comma or the closing bracket is missing"),
        ('[{"text": "a"}, 5]', r"a.json, object 2: a JSON object is expected, not int"),
        ('[{"text": "a"}] []', r"a.json: something follows the array's closing bracket"),
        ('[{"text": "a"},', r"a.json, object 2: not JSON"),
    ],
)
def test_the_error_about_a_damaged_array_gives_the_object(tmp_path, content, message):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(DataError, match=message):
        texts(tmp_path / "a.json")


def test_rows_without_text_are_left_out(tmp_path):
    rows = [{"text": "a"}, {"text": None}, {"text": "  \n"}, {"text": "b"}]
    assert texts(write_jsonl(tmp_path / "a.jsonl", rows)) == ["a", "b"]


def test_errors_about_damaged_files_name_them(tmp_path):
    for name, compress in (("a.txt.gz", gzip.compress), ("a.txt.xz", lzma.compress), ("a.txt.bz2", bz2.compress)):
        (tmp_path / name).write_bytes(compress("".join(TEXTS).encode())[:-20])
        with pytest.raises(DataError, match=f"{name}: the .* file is damaged or truncated"):
            texts(tmp_path / name)
        (tmp_path / name).write_bytes(b"plainly not compressed")
        with pytest.raises(DataError, match=f"{name}: the .* file is damaged or truncated"):
            texts(tmp_path / name)
    (tmp_path / "latin.txt").write_bytes("naïve".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt: not UTF-8 text"):
        texts(tmp_path / "latin.txt")
    (tmp_path / "cut.csv").write_text('text\n"never closed\n')
    with pytest.raises(DataError, match=r"cut.csv, line 2: not valid CSV"):
        texts(tmp_path / "cut.csv")


def test_a_byte_order_mark_and_windows_line_ends_are_not_part_of_the_text(tmp_path):
    (tmp_path / "a.txt").write_bytes("\ufeffone\r\ntwo".encode())
    assert texts(tmp_path / "a.txt") == ["one\ntwo"]


def test_text_without_separators_is_one_document_in_blocks(tmp_path):
    paragraphs = [f"Paragraph {number}. " + "word " * 80 for number in range(400)]
    whole = "\n\n".join(paragraphs)
    (tmp_path / "a.txt").write_text(whole)
    units = list(read_units(tmp_path / "a.txt", Reading(), Meter()))
    assert "".join(unit.text for unit in units) == whole
    assert len(units) > 10
    assert all(unit.text.endswith("\n\n") for unit in units[:-1])
    assert [unit.more for unit in units] == [True] * (len(units) - 1) + [False]


@settings(max_examples=400, deadline=None)
@example(["", "a" * 25 + "\n", ""], "<>", 3, 2)
@example(["", "\n" + "a" * 16], "", 1, 2)
@given(
    st.lists(st.text("ab \n", max_size=60), max_size=12),
    st.sampled_from(["", "<>", "\n\n"]),
    st.integers(1, 20),
    st.integers(1, 30),
)
def test_units_do_not_depend_on_how_the_text_is_read(pieces, separator, search_length, read_length):
    """Small limits reach every edge case: separators split between two reads, late ones, and long documents."""
    text = (separator or "|").join(pieces)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("_LOOK", search_length),
            ("_READ", read_length),
            ("_LONG", 25),
            ("_BLOCK", 8),
            ("_BLOCK_MAX", 16),
        ):
            patch.setattr(readers, name, value)
        stream = io.StringIO(text)
        units = list(text_units(iter(lambda: stream.read(read_length), ""), separator))
    documents_read, current = [], ""
    for index, unit in enumerate(units):
        current += unit.text
        assert not unit.joined or units[index - 1].more
        if not unit.more:
            documents_read.append(current)
            current = ""
    assert not current
    expected = text.split(separator) if separator else [text]
    searched_length = -(-search_length // read_length) * read_length  # only whole reads are searched
    if separator and separator in text[:searched_length]:
        assert [part for part in documents_read if part.strip()] == [
            part.strip("\n") for part in expected if part.strip()
        ]
    else:
        assert [part for part in documents_read if part.strip()] == [part for part in expected if part.strip()]


def test_cutting_long_text_does_not_change_the_tokens(tmp_path, monkeypatch):
    backend = load_tokenizer(gpt2_folder(tmp_path / "gpt2")).backend
    text = "\n".join(documents(40)) + "\n\n  \n".join(documents(10, seed=1)) + " ".join(documents(20, seed=2))
    monkeypatch.setattr("oelm.data.corpus.encode._PIECE", 300)
    pieces = cut(text)
    assert "".join(pieces) == text
    assert len(pieces) > 100
    assert max(map(len, pieces)) <= 300
    assert [token for piece in pieces for token in backend.encode(piece).ids] == backend.encode(text).ids
    assert cut("x" * 1000) == ["x" * 300] * 3 + ["x" * 100]


def test_a_folder_is_read_in_the_order_of_names(tmp_path):
    folder = tmp_path / "corpus"
    (folder / "b").mkdir(parents=True)
    write_corpus(folder / "c.txt", TEXTS[4:])
    write_jsonl(folder / "b" / "x.jsonl", [{"text": text} for text in TEXTS[2:4]])
    (folder / "a.txt.gz").write_bytes(gzip.compress(write_corpus(tmp_path / "a.txt", TEXTS[:2]).read_bytes()))
    (folder / "LICENSE").write_text("do as you like")
    (folder / ".hidden.txt").write_text("not this")
    source, val, _ = resolve(folder, None, Reading())
    assert val is None
    assert [unit.text for unit in source.units(Meter())] == TEXTS
    assert source.ignored == ("LICENSE",)
    names = [header.name for header in source.identify("train", lambda _: None)]
    assert names == ["a.txt.gz", "b/x.jsonl", "c.txt"]


def test_a_folder_with_held_out_files_is_refused(tmp_path):
    for name in ("train.txt", "validation.txt"):
        write_corpus(tmp_path / name, TEXTS)
    with pytest.raises(DataError, match=r"train\.txt and validation\.txt"):
        resolve(tmp_path, None, Reading())
    resolve(tmp_path / "train.txt", tmp_path / "validation.txt", Reading())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("missing.txt", r"missing.txt: no such file or folder"),
        ("/no/where", "no such file or folder"),
        ("tinystorys", r"'tinystories'.*tinystories, openwebtext, wikitext-103-raw"),
        (Path("tinystories"), "no such file or folder"),
    ],
)
def test_a_missing_source_is_named(source, message):
    with pytest.raises(DataError, match=message):
        resolve(source, None, Reading())


def test_files_of_unknown_formats_are_refused(tmp_path):
    (tmp_path / "a.docx").write_text("x")
    with pytest.raises(DataError, match=r"a.docx: .*known are .txt"):
        resolve(tmp_path / "a.docx", None, Reading())
    with pytest.raises(DataError, match="no file that can be read"):
        resolve(tmp_path, None, Reading())
    with pytest.raises(DataError, match=r"nothing.txt: no such file"):
        resolve(write_corpus(tmp_path / "a.txt", TEXTS), tmp_path / "nothing.txt", Reading())


class StandInHub:
    """A stand-in for the `datasets` package with the one function that is used."""

    def __init__(self, splits):
        self.splits, self.calls = splits, []

    def load_dataset(self, repo, config, *, split, streaming, revision):
        self.calls.append((repo, config, split, streaming, revision))
        return iter(self.splits[split])


def units_of(source) -> list[str]:
    return [unit.text for unit in source.units(Meter())]


def test_a_hub_dataset_is_streamed(monkeypatch):
    hub = StandInHub({"train": [{"text": "a"}, {"text": ""}, {"text": "b"}], "validation": [{"text": "v"}]})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    train, val, _ = resolve("tinystories", None, Reading())
    assert (units_of(train), units_of(val)) == (["a", "b"], ["v"])
    assert hub.calls[0] == ("roneneldan/TinyStories", None, "train", True, None)
    train, val, _ = resolve("owner/name:config@abc", "validation", Reading())
    assert (units_of(train), units_of(val)) == (["a", "b"], ["v"])
    assert hub.calls[-1] == ("owner/name", "config", "validation", True, "abc")
    assert resolve("openwebtext", None, Reading())[1] is None


def test_the_lines_of_wikitext_are_joined_into_one_document(monkeypatch):
    lines = [" = Title = \n", "", " First line . \n", " Second . \n"] * 3000
    hub = StandInHub({"train": [{"text": line} for line in lines], "validation": []})
    monkeypatch.setitem(sys.modules, "datasets", hub)
    train, *_ = resolve("wikitext-103-raw", None, Reading())
    units = list(train.units(Meter()))
    assert "".join(unit.text for unit in units) == "".join(lines)
    assert [unit.more for unit in units] == [True] * (len(units) - 1) + [False]
    assert hub.calls[0][:2] == ("Salesforce/wikitext", "wikitext-103-raw-v1")


def test_without_the_hub_nothing_asks_for_it(monkeypatch):
    def load_dataset(*arguments, **options):
        raise ConnectionError(f"offline: {constants.HF_HUB_OFFLINE}")

    monkeypatch.setattr("oelm.base.hub.hub_answers", lambda _: False)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    source, *_ = resolve("openwebtext", None, Reading())
    with pytest.raises(DataError, match=r"from the Hub \(ConnectionError: offline: True\)"):
        units_of(source)


def test_hub_failures_are_explained(monkeypatch):
    def offline(*arguments, **options):
        raise ConnectionError("no route")

    def broken(*arguments, **options):
        yield {"text": "a"}
        raise RuntimeError("connection reset")

    source, *_ = resolve("openwebtext", None, Reading())
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=offline))
    with pytest.raises(DataError, match=r"Skylion007/openwebtext.*from the Hub \(ConnectionError: no route\).*network"):
        units_of(source)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=broken))
    with pytest.raises(DataError, match="after 1 rows"):
        units_of(source)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: [{"x": "1", "y": "2"}]))
    with pytest.raises(DataError, match="which column holds the text"):
        units_of(source)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        units_of(source)


def test_the_separator_can_be_chosen(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    assert texts(tmp_path / "a.txt", separator="\n") == ["one", "two", "three"]
    assert texts(tmp_path / "a.txt", separator="\n\n") == ["one\ntwo", "three"]
    (tmp_path / "b.txt").write_text(f"one{SEPARATOR}two")
    assert texts(tmp_path / "b.txt", separator="") == [f"one{SEPARATOR}two"]
