"""Loading labelled tasks: every layout gives the same data, held-out rows stay held out, errors give the location."""

import csv
import gzip
import json
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import numpy as np
import pytest

from oelm.config import RunConfig
from oelm.data import DataError, open_labelled
from oelm.data.labelled.examples import digest
from oelm.data.labelled.tasks import NAMES, TASKS
from oelm.errors import ConfigError

SENTIMENT = [{"sentence": f'a film "number" {n} , fine ', "label": n % 2} for n in range(40)]
HELD_OUT = [{"sentence": f"held out {n}", "label": n % 2} for n in range(8)]
INFERENCE = [
    {"premise": f"p {n // 3}", "hypothesis": f"h {n}", "label": TASKS["mnli"].labels[n % 3]} for n in range(60)
]


def pairs(name: str, count: int = 9) -> list[dict]:
    return [{"premise": f"{name} {n}", "hypothesis": "h", "label": TASKS["mnli"].labels[n % 3]} for n in range(count)]


def write(path: Path, rows: list[dict]) -> Path:
    """Write rows in the format of the file's extension."""
    path.parent.mkdir(parents=True, exist_ok=True)
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    if plain.suffix == ".parquet":
        arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
        parquet.write_table(arrow.Table.from_pylist(rows), path)
        return path
    if plain.suffix == ".jsonl":
        text = "".join(json.dumps(row) + "\n" for row in rows)
    elif plain.suffix == ".tsv":
        text = "".join("\t".join(map(str, cells)) + "\n" for cells in (rows[0], *(row.values() for row in rows)))
    else:
        with plain.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        text = plain.read_text(encoding="utf-8")
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return path


def sst2(folder: Path, train: list[dict] = SENTIMENT, validation: list[dict] = HELD_OUT) -> Path:
    write(folder / "train.tsv", train)
    write(folder / "dev.tsv", validation)
    return folder


@pytest.mark.parametrize(
    "names",
    [
        ("train.tsv", "dev.tsv"),
        ("sst2/train.tsv", "sst2/dev.tsv"),
        ("SST-2/train.csv", "SST-2/validation.csv"),
        ("train.jsonl.gz", "validation.tsv.gz"),
        ("sst2/train-00000-of-00001.parquet", "sst2/validation-00000-of-00001.parquet"),
    ],
)
def test_every_layout_and_format_gives_the_same_data(tmp_path, names):
    for name, rows in zip(names, (SENTIMENT, HELD_OUT), strict=True):
        write(tmp_path / "data" / name, rows)
    data = open_labelled("sst2", tmp_path / "data")
    assert data.sha256 == open_labelled("sst2", sst2(tmp_path / "other")).sha256
    assert data.labels == ("negative", "positive")
    train = data.splits["train"]
    assert train.texts == [row["sentence"] for row in SENTIMENT]
    assert train.labels.tolist() == [row["label"] for row in SENTIMENT]
    assert train.labels.dtype == np.int64
    assert train.pairs is None
    assert train.answers is None
    assert [data.sources[split]["file"] for split in ("train", "validation")] == list(names)
    assert [data.sources[split]["rows"] for split in ("train", "validation")] == [40, 8]
    assert not data.synthetic


def test_parts_are_read_in_order_and_a_missing_one_is_named(tmp_path):
    sst2(tmp_path)
    (tmp_path / "train.tsv").unlink()
    for part in range(2):
        write(tmp_path / f"train-0000{part}-of-00002.jsonl", SENTIMENT[20 * part : 20 * part + 20])
    data = open_labelled("sst2", tmp_path)
    assert data.splits["train"].texts == [row["sentence"] for row in SENTIMENT]
    assert data.sources["train"]["file"] == ["train-00000-of-00002.jsonl", "train-00001-of-00002.jsonl"]
    (tmp_path / "train-00000-of-00002.jsonl").unlink()
    with pytest.raises(DataError, match=r"train has 2 parts.* number 0 "):
        open_labelled("sst2", tmp_path)


def test_a_folder_with_the_tasks_name_comes_first_and_folders_are_not_mixed(tmp_path):
    sst2(tmp_path, HELD_OUT, SENTIMENT)
    write(tmp_path / "sst2" / "train.tsv", SENTIMENT)
    data = open_labelled("sst2", tmp_path)
    assert data.sources["train"]["file"] == "sst2/train.tsv"
    assert data.sources["validation"]["cut_from"] == "train"


@pytest.mark.parametrize(
    ("negative", "positive"), [(0, 1), ("0", "1"), ("negative", "positive"), ("Negative", "POSITIVE"), (0.0, "1.0")]
)
def test_labels_may_be_numbers_or_names(tmp_path, negative, positive):
    rows = [row | {"label": (negative, positive)[row["label"]]} for row in SENTIMENT]
    write(tmp_path / "train.jsonl", rows)
    write(tmp_path / "dev.jsonl", HELD_OUT)
    assert open_labelled("sst2", tmp_path).splits["train"].labels.tolist() == [0, 1] * 20


def test_the_hash_covers_all_content_and_its_order(tmp_path):
    first = open_labelled("sst2", sst2(tmp_path / "a")).sha256
    changed = [
        open_labelled("sst2", sst2(tmp_path / "b", SENTIMENT[::-1])).sha256,
        open_labelled("sst2", sst2(tmp_path / "c", validation=HELD_OUT[:-1])).sha256,
        open_labelled("sst2", sst2(tmp_path / "d", [SENTIMENT[0] | {"label": 1}, *SENTIMENT[1:]])).sha256,
    ]
    assert len({first, *changed}) == 4


def test_the_public_mnli_files_are_read_without_rows_that_lack_a_consensus(tmp_path):
    """These files have many columns; gold_label is '-' where the annotators did not agree."""
    rows = [
        {"index": n, "sentence1": row["premise"], "sentence2": row["hypothesis"], "label1": "x", "gold_label": label}
        for n, row in enumerate(INFERENCE)
        for label in ("-" if n % 10 == 9 else row["label"],)
    ]
    write(tmp_path / "MNLI" / "train.tsv", rows)
    write(tmp_path / "MNLI" / "dev_matched.tsv", pairs("matched"))
    write(tmp_path / "MNLI" / "dev_mismatched.tsv", pairs("mismatched"))
    data = open_labelled("mnli", tmp_path)
    assert list(data.splits) == ["train", "validation", "mismatched"]
    assert data.labels == ("entailment", "neutral", "contradiction")
    train = data.splits["train"]
    assert len(train) == 54
    assert (train.texts[4], train.pairs[4], train.labels[4]) == ("p 1", "h 4", 1)
    assert data.sources["train"]["no_consensus"] == 6
    assert "6 rows without a consensus" in data.description
    (tmp_path / "MNLI" / "dev_mismatched.tsv").unlink()
    assert list(open_labelled("mnli", tmp_path).splits) == ["train", "validation"]


def xnli(folder: Path, *names: str) -> Path:
    write(folder / "mnli" / "train.tsv", INFERENCE)
    for name in names:
        write(folder / name, pairs(name))
    return folder


def test_xnli_trains_on_mnli_validates_on_english_dev_and_reports_tests(tmp_path):
    names = ("xnli/en.dev.tsv", "xnli/en.test.tsv", "xnli/de.dev.tsv", "xnli/de.test.tsv", "mnli/dev_matched.tsv")
    data = open_labelled("xnli", xnli(tmp_path, *names), languages=("en", "de"))
    assert {split: source["file"] for split, source in data.sources.items()} == {
        "train": "mnli/train.tsv",
        "validation": "xnli/en.dev.tsv",
        "xnli-en": "xnli/en.test.tsv",
        "xnli-de": "xnli/de.test.tsv",
        "matched": "mnli/dev_matched.tsv",
    }


def test_xnli_never_reports_its_validation_rows(tmp_path):
    data = open_labelled("xnli", xnli(tmp_path, "xnli/en.dev.tsv", "xnli/sw.dev.tsv"), languages=("en", "sw"))
    assert list(data.splits) == ["train", "validation", "xnli-sw"]
    assert data.sources["xnli-sw"]["file"] == "xnli/sw.dev.tsv"
    without_english = open_labelled(
        "xnli", xnli(tmp_path / "b", "mnli/dev_matched.tsv", "xnli/sw.test.tsv"), languages=["sw"]
    )
    assert {split: source["file"] for split, source in without_english.sources.items()} == {
        "train": "mnli/train.tsv",
        "validation": "mnli/dev_matched.tsv",
        "xnli-sw": "xnli/sw.test.tsv",
    }
    with pytest.raises(DataError, match=r"no file for xnli-fr. Looked for fr.test.*hf download facebook/xnli"):
        open_labelled("xnli", tmp_path, languages=("en", "fr"))
    with pytest.raises(DataError, match=r"languages de: .*xnli"):
        open_labelled("mnli", tmp_path, languages=("de",))


def test_the_public_xnli_file_has_every_language(tmp_path):
    rows = [
        {"language": language, "gold_label": row["label"], "sentence1": row["premise"], "sentence2": "h"}
        for language in ("ar", "en")
        for row in pairs(language)
    ]
    write(tmp_path / "XNLI-1.0" / "xnli.dev.tsv", rows)
    write(tmp_path / "XNLI-1.0" / "xnli.dev.jsonl", rows)
    write(tmp_path / "XNLI-MT-1.0" / "multinli" / "multinli.train.en.tsv", [
        {"premise": row["premise"], "hypo": "h", "label": row["label"].replace("contradiction", "contradictory")}
        for row in INFERENCE
    ])  # fmt: skip
    data = open_labelled("xnli", tmp_path, languages=("ar", "en"))
    assert data.splits["validation"].texts == [f"en {n}" for n in range(9)]
    assert data.splits["xnli-ar"].texts == [f"ar {n}" for n in range(9)]
    assert Counter(data.splits["train"].labels.tolist()) == {0: 20, 1: 20, 2: 20}
    with pytest.raises(DataError, match=r"xnli.dev.tsv \(language fr\): holds no row"):
        open_labelled("xnli", tmp_path, languages=("fr",))


def imdb(folder: Path, count: int = 400) -> Path:
    rows = [{"text": f"review {n % (count - 40)}", "label": "pos" if n % 4 else "neg"} for n in range(count)]
    write(folder / "train.jsonl", rows)
    write(folder / "test.jsonl", [{"text": f"unseen {n}", "label": n % 2} for n in range(10)])
    return folder


def test_a_validation_split_is_held_out_when_there_is_none(tmp_path):
    data = open_labelled("imdb", imdb(tmp_path), validation_share=0.1)
    assert list(data.splits) == ["train", "validation", "test"]
    train, validation = data.splits["train"], data.splits["validation"]
    assert len(train) + len(validation) == 400
    assert not set(train.texts) & set(validation.texts), "a duplicate text is in both splits"
    counts = Counter(validation.labels.tolist())
    assert 10 <= counts[0] <= 12
    assert 30 <= counts[1] <= 32
    assert data.sources["validation"] | {"sha256": ""} == {
        "file": "train.jsonl", "cut_from": "train", "share": 0.1, "rows": len(validation), "sha256": ""
    }  # fmt: skip
    assert "validation is cut from train (0.1 of it)" in data.description
    again = open_labelled("imdb", tmp_path, validation_share=0.1, fraction=0.5)
    assert again.splits["validation"].texts == validation.texts, "the training fraction changed the validation split"


def test_pairs_with_the_same_premise_stay_in_one_split(tmp_path):
    write(tmp_path / "train.tsv", INFERENCE)
    data = open_labelled("mnli", tmp_path, validation_share=0.2)
    assert not set(data.splits["train"].texts) & set(data.splits["validation"].texts)
    assert len(data.splits["validation"]) % 3 == 0


def test_a_fraction_keeps_the_classes_and_their_order(tmp_path):
    whole = open_labelled("sst2", sst2(tmp_path))
    part = open_labelled("sst2", tmp_path, fraction=0.25)
    assert Counter(part.splits["train"].labels.tolist()) == {0: 5, 1: 5}
    positions = [whole.splits["train"].texts.index(text) for text in part.splits["train"].texts]
    assert positions == sorted(positions)
    assert part.splits["validation"].texts == whole.splits["validation"].texts
    assert (part.sources["train"]["fraction"], part.sources["train"]["of"]) == (0.25, 40)
    assert part.sha256 != whole.sha256


def test_a_classification_task_can_be_read_as_text_to_text(tmp_path):
    data = open_labelled("sst2", sst2(tmp_path), form="text")
    train = data.splits["train"]
    assert data.labels == ()
    assert (train.texts[1], train.answers[1]) == ('sst2 sentence: a film "number" 1 , fine ', "positive")
    assert len(train.labels) == 0
    assert train.pairs is None
    write(tmp_path / "m" / "train.tsv", INFERENCE)
    inference = open_labelled("mnli", tmp_path / "m", form="text").splits["train"]
    assert inference.texts[0].startswith("mnli hypothesis: h ")
    assert " premise: p " in inference.texts[0]
    assert set(inference.answers) == set(TASKS["mnli"].labels)


def test_splits_and_labels_of_users_data_are_detected(tmp_path):
    rows = [{"id": n, "body": f"t {n}", "category": ("spam", "ham", "eggs")[n % 3]} for n in range(30)]
    write(tmp_path / "train.csv", rows)
    write(tmp_path / "val.jsonl", [row | {"body": f"v {row['id']}"} for row in rows[:6]])
    write(tmp_path / "test.csv", [row | {"body": f"x {row['id']}"} for row in rows[:2]])
    data = open_labelled("folder", tmp_path)
    assert data.labels == ("eggs", "ham", "spam")
    assert list(data.splits) == ["train", "validation", "test"]
    assert data.splits["train"].labels.tolist()[:3] == [2, 1, 0]


def test_users_data_is_described_by_the_name_of_its_folder(tmp_path, monkeypatch):
    write(tmp_path / "reviews" / "train.csv", [{"text": f"t {n}", "label": n % 2} for n in range(40)])
    monkeypatch.chdir(tmp_path / "reviews")
    for path in (tmp_path / "reviews", "."):
        data = open_labelled("folder", path, validation_share=0.2)
        assert data.description.startswith("reviews; rows: 32 train, 8 validation")


def test_numeric_labels_of_users_data_are_sorted_as_numbers(tmp_path):
    write(tmp_path / "train.csv", [{"text": f"t {n}", "label": n % 12} for n in range(120)])
    data = open_labelled("folder", tmp_path, validation_share=0.2)
    assert data.labels == tuple(str(n) for n in range(12))
    assert data.sources["validation"]["cut_from"] == "train"


def test_columns_of_users_data_are_detected_or_must_be_named(tmp_path):
    write(tmp_path / "train.csv", [{"a": f"t {n}", "b": f"u {n}", "kind": "xy"[n % 2]} for n in range(30)])
    both = r"label.*'a', 'b', 'kind'.*task\.label=COLUMN, and that of the text: task\.text=COLUMN$"
    with pytest.raises(DataError, match=both):
        open_labelled("folder", tmp_path)
    with pytest.raises(DataError, match=r"text.*'a', 'b', 'kind'.*task\.text=COLUMN"):
        open_labelled("folder", tmp_path, label="kind")
    with pytest.raises(DataError, match="no column 'c', which `pair` names; it has 'a', 'b', 'kind'"):
        open_labelled("folder", tmp_path, label="kind", text="a", pair="c")
    with pytest.raises(DataError, match="must be different columns"):
        open_labelled("folder", tmp_path, label="kind", text="a", pair="a")
    assert open_labelled("folder", tmp_path, label="kind", text="a").splits["train"].pairs is None
    train = open_labelled("folder", tmp_path, label="kind", pair="b").splits["train"]
    assert (train.texts[0][0], train.pairs[0][0]) == ("t", "u")
    with pytest.raises(DataError, match="30 different labels in 30 rows"):
        open_labelled("folder", tmp_path, label="b", text="a")


def test_a_table_with_semicolons_is_recognised(tmp_path):
    (tmp_path / "train.csv").write_text("text;label\nfine;1\n", encoding="utf-8-sig")
    with pytest.raises(DataError, match=r"separated by ';'\? Save it with commas"):
        open_labelled("folder", tmp_path)


def test_usual_names_of_pairs_in_users_data_are_recognised(tmp_path):
    write(tmp_path / "train.jsonl", INFERENCE)
    train = open_labelled("folder", tmp_path).splits["train"]
    assert train.texts[0].startswith("p ")
    assert train.pairs[0].startswith("h ")


def test_users_data_can_be_read_as_text_to_text(tmp_path):
    rows = [{"source": f"say {n}", "target": f"{n}!", "note": "x"} for n in range(40)]
    write(tmp_path / "train.jsonl", rows)
    data = open_labelled("folder", tmp_path, form="text", validation_share=0.1)
    assert (len(data.splits["train"]), len(data.splits["validation"])) == (36, 4)
    assert data.labels == ()
    text = data.splits["train"].texts[0]
    assert data.splits["train"].answers[0] == f"{text.removeprefix('say ')}!"
    swapped = open_labelled("folder", tmp_path, form="text", source="target", target="source")
    assert swapped.splits["train"].texts[0].endswith("!")
    with pytest.raises(DataError, match=r"columns.*`source` and `target`"):
        open_labelled("folder", tmp_path, form="text", source="note")
    write(tmp_path / "train.jsonl", [rows[0] | {"target": " "}, *rows[1:]])
    with pytest.raises(DataError, match=r"1 of 40 rows .* line 1"):
        open_labelled("folder", tmp_path, form="text")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("dev.tsv", "sentence\tlabel\na\t-1\nb\t-1\n", r"dev.tsv: 2 of 2 rows .*\(no label, or -1"),
        ("dev.tsv", "sentence\tlabel\na\t\nb\t1\n", r"1 of 2 rows .*line 2.*that have labels: train, validation"),
        ("dev.tsv", "index\tsentence\n0\ta\n", r"dev.tsv: 1 of 1 rows .*no column 'label' or 'gold_label'"),
        ("dev.tsv", "sentence\tlabel\na\t0\nb\t2\n", r"line 3: label '2' is none of negative \(0\), positive \(1\)"),
        ("dev.tsv", "sentence\tlabel\na\t0\nb\t0\n", "no row of validation has the label positive"),
        ("dev.tsv", "sentence\tlabel\n \t0\nb\t1\n", r"dev.tsv, line 2: 'sentence' is empty"),
        ("dev.tsv", "sentence\tlabel\na\t0\nb\n", r"dev.tsv, line 3: no 'label'.*truncated"),
        ("dev.tsv", "sentence\tlabel\na\tb\t0\n", r"dev.tsv, line 2: 3 cells, but the first line names 2 columns"),
        ("dev.tsv", "sentence\tsentence\tlabel\na\tb\t0\n", r"dev.tsv: two columns are called 'sentence'"),
        ("dev.tsv", "words\tlabel\na\t0\n", r"dev.tsv: no column 'sentence' or 'text'; it has 'words', 'label'"),
        ("dev.tsv", "sentence\tlabel\n", r"dev.tsv: holds no row"),
        ("dev.tsv", "", r"dev.tsv: empty; the first line must name the columns"),
        ("dev.tsv", b"sentence\tlabel\na\t0\nnaive\t1\nna\xefve\t1\n", r"dev.tsv: not UTF-8 text .*line 4"),
        ("dev.csv", 'sentence,label\na,0\nb,1\n"never closed,1\n', r"dev.csv, line 4: not valid CSV"),
        ("dev.jsonl", '{"sentence": "a", "label": 0}\n{"sentence"', r"dev.jsonl, line 2: not JSON"),
        ("dev.jsonl", '{"sentence": "a", "label": 0, "label": 1}\n', r"dev.jsonl, line 1: a key appears twice"),
        ("dev.jsonl", '{"sentence": "a", "label": 0.5}\n', r"dev.jsonl, line 1: 'label' is 0.5"),
        ("dev.jsonl", '{"sentence": 3, "label": 0}\n', r"dev.jsonl, line 1: 'sentence' holds int, not text"),
        ("dev.jsonl", '{"sentence": "a", "label": [0]}\n', r"dev.jsonl, line 1: 'label' holds list, not a label"),
        ("dev.parquet", "nonsense", r"dev.parquet: not a readable Parquet file"),
    ],
)  # fmt: skip
def test_errors_about_bad_files_give_the_location(tmp_path, file, content, message):
    write(tmp_path / "train.tsv", SENTIMENT)
    (tmp_path / file).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        open_labelled("sst2", tmp_path)


def test_the_error_about_a_truncated_file_names_the_last_good_row(tmp_path):
    sst2(tmp_path)
    (tmp_path / "train.tsv").unlink()
    rows = [{"sentence": f"{digest(str(n)).hex()} {n}", "label": n % 2} for n in range(20_000)]
    whole = write(tmp_path / "train.tsv.gz", rows).read_bytes()
    (tmp_path / "train.tsv.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"train.tsv.gz: the .gz file is damaged or truncated after .* line \d\d\d+"):
        open_labelled("sst2", tmp_path)


def test_held_out_rows_that_were_trained_on_are_refused_or_counted(tmp_path):
    with pytest.raises(DataError, match="validation is also in train"):
        open_labelled("sst2", sst2(tmp_path, SENTIMENT, SENTIMENT[3:7]))
    data = open_labelled("sst2", sst2(tmp_path, SENTIMENT, [*HELD_OUT, *SENTIMENT[:3]]))
    assert data.sources["validation"]["also_in_train"] == 3
    write(tmp_path / "test.tsv", HELD_OUT[:4])
    sst2(tmp_path)
    with pytest.raises(DataError, match="test is also in validation"):
        open_labelled("folder", tmp_path)


def test_labels_that_are_not_in_the_training_rows_are_refused(tmp_path):
    sst2(tmp_path, [row | {"label": "ab"[row["label"]]} for row in SENTIMENT], [{"sentence": "s", "label": "c"}])
    with pytest.raises(DataError, match=r"dev\.tsv, line 2: label 'c' is none of a, b"):
        open_labelled("folder", tmp_path)
    sst2(tmp_path, [row | {"label": "a"} for row in SENTIMENT])
    with pytest.raises(DataError, match="every row has the label 'a'"):
        open_labelled("folder", tmp_path)


def test_an_unlabelled_file_of_a_user_is_refused(tmp_path):
    sst2(tmp_path)
    write(tmp_path / "test.tsv", [{"index": n, "sentence": f"t {n}"} for n in range(5)])
    with pytest.raises(DataError, match=r"test\.tsv: 5 of 5 rows .*train, validation"):
        open_labelled("folder", tmp_path)


def test_a_pair_task_needs_two_texts(tmp_path):
    write(tmp_path / "train.tsv", [{"premise": "p", "label": 0}])
    with pytest.raises(DataError, match=r"two texts, 'premise' and 'hypothesis' or 'sentence2' or 'hypo'; it has"):
        open_labelled("mnli", tmp_path)
    with pytest.raises(DataError, match="pair 'x': the rows of sst2 have one text"):
        open_labelled("sst2", sst2(tmp_path), pair="x")


def test_two_files_for_one_split_are_refused(tmp_path):
    sst2(tmp_path)
    write(tmp_path / "train.csv", SENTIMENT)
    with pytest.raises(DataError, match=r"train.csv, train.tsv .*keep one"):
        open_labelled("sst2", tmp_path)
    (tmp_path / "train.csv").unlink()
    write(tmp_path / "validation.tsv", HELD_OUT)
    for task in ("sst2", "folder"):
        with pytest.raises(DataError, match="the same split: keep one"):
            open_labelled(task, tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "sst3"}, r"'sst3'.*'sst2'.*sst2, mnli"),
        ({"name": "sst2", "path": "nowhere"}, "nowhere: no such folder"),
        ({"name": "folder", "path": "file.csv"}, r"file\.csv: a file; .* called train\.csv$"),
        ({"name": "sst2", "path": "."}, r"no training file for the task 'sst2'.*train .*hf download nyu-mll/glue"),
        ({"name": "folder", "path": "."}, r"no training file for the task 'folder'. Looked for train \(with .jsonl"),
        ({"name": "folder"}, r"task 'folder': needs --data DIR \(data.path\)"),
        ({"name": "sst2", "form": "words"}, "form: .*'labels' or 'text'.*'words'"),
        ({"name": "sst2", "fraction": 0}, r"fraction: .* greater than 0 \(got 0\)"),
        ({"name": "sst2", "validation_share": 0.9}, r"validation_share: .*0\.5 \(got 0\.9\)"),
        ({"name": "sst2", "source": "x"}, "source 'x': .*'sst2'.*'labels' takes label, pair, text"),
        ({"name": "folder", "path": ".", "form": "text", "label": "x"}, "takes source, target"),
        ({"name": "sst2", "path": ".", "revision": "abc"}, "revision 'abc': .*Hub"),
        ({"name": "builtin:sentiment", "path": "."}, "builtin:sentiment: .*no path, no columns and no revision"),
        ({"name": "builtin:sentiment", "text": "x"}, "builtin:sentiment: .*no path, no columns and no revision"),
    ],
)
def test_bad_arguments_are_refused(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    Path("file.csv").write_text("x")
    with pytest.raises(DataError, match=message):
        open_labelled(**arguments)


class Rows:
    """A stand-in for a table of the `datasets` package, with the parts that are used."""

    def __init__(self, rows, names=None):
        self.rows, self.features = rows, {"label": SimpleNamespace(names=names)} if names else {}

    def iter(self, batch_size):
        for start in range(0, len(self.rows), batch_size):
            part = self.rows[start : start + batch_size]
            yield {column: [row[column] for row in part] for column in part[0]}


@pytest.fixture
def hub(monkeypatch):
    """Replace the Hub by one with SST-2; return the calls that were made, and the tables by split."""
    names = ["negative", "positive"]
    tables = {"train": Rows(SENTIMENT, names), "validation": Rows(HELD_OUT, names)}
    calls = []

    def load_dataset(repo, config, *, split, revision):
        calls.append((repo, config, split, revision))
        return tables[split]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setattr(
        huggingface_hub.HfApi, "dataset_info", lambda self, repo, revision, timeout: SimpleNamespace(sha="c" * 40)
    )
    return SimpleNamespace(tables=tables, calls=calls)


def test_the_hub_and_local_files_give_the_same_data_and_the_commit_is_recorded(hub, tmp_path):
    data = open_labelled("sst2")
    assert data.sha256 == open_labelled("sst2", sst2(tmp_path)).sha256
    assert hub.calls == [("nyu-mll/glue", "sst2", split, "c" * 40) for split in ("train", "validation")]
    source = data.sources["train"]
    location = {"repo": "nyu-mll/glue", "config": "sst2", "split": "train", "revision": "main", "commit": "c" * 40}
    assert source | location == source
    assert source["rows"] == 40


def test_a_revision_is_loaded_and_recorded(hub, monkeypatch):
    commit = "a" * 40
    assert open_labelled("sst2", revision=commit).sources["train"]["commit"] == commit
    assert hub.calls[-1][3] == commit

    def offline(self, repo, revision, timeout):
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub.HfApi, "dataset_info", offline)
    source = open_labelled("sst2", revision="v2").sources["train"]
    assert (source["revision"], source["commit"]) == ("v2", None)
    assert hub.calls[-1][3] == "v2"


def test_labels_on_the_hub_are_read_by_their_class_names(hub):
    """A dataset whose class indices are in another order than the task's is read by the class names."""
    flipped = [row | {"label": 1 - row["label"]} for row in SENTIMENT]
    hub.tables["train"] = Rows(flipped, ["positive", "negative"])
    assert open_labelled("sst2").splits["train"].labels.tolist() == [0, 1] * 20


def test_hub_failures_are_explained(hub, monkeypatch):
    hub.tables["validation"] = Rows([row | {"label": -1} for row in HELD_OUT], ["negative", "positive"])
    with pytest.raises(DataError, match=r"nyu-mll/glue:sst2@main, split 'validation': 8 of 8 rows have no answer"):
        open_labelled("sst2")
    del hub.tables["validation"]
    with pytest.raises(
        DataError, match=r"split 'validation': cannot be read from the Hub \(KeyError.*give their folder"
    ):
        open_labelled("sst2")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match="pip install datasets"):
        open_labelled("sst2")


def test_xnli_on_the_hub_is_one_repository(hub):
    hub.tables.update(train=Rows(INFERENCE), validation=Rows(pairs("dev")), test=Rows(pairs("test")))
    data = open_labelled("xnli", languages=("en", "de"))
    assert list(data.splits) == ["train", "validation", "xnli-en", "xnli-de"]
    assert [call[:3] for call in hub.calls] == [
        ("facebook/xnli", "en", "train"),
        ("facebook/xnli", "en", "validation"),
        ("facebook/xnli", "en", "test"),
        ("facebook/xnli", "de", "test"),
    ]


def test_the_config_has_the_same_bound_for_the_validation_share():
    RunConfig.load({"task": {"name": "imdb", "validation_share": 0.5}})
    with pytest.raises(ConfigError, match=r"task\.validation_share: .*0\.5 \(got 0\.6\)"):
        RunConfig.load({"task": {"name": "imdb", "validation_share": 0.6}})


def test_every_task_is_complete_and_documented():
    for name, task in TASKS.items():
        assert len(task.labels) == len(set(task.labels)) > 1
        assert "{text}" in task.prompt
        assert ("{pair}" in task.prompt) == bool(task.pair), name
        assert set(task.other_spellings.values()) <= set(task.labels)
        assert task.train[0].split == "train"
    guide = (Path(__file__).parents[3] / "docs" / "tasks.md").read_text(encoding="utf-8")
    assert [name for name in NAMES if f"`{name}`" not in guide] == []
    assert [task.repo for task in TASKS.values() if task.repo not in guide] == []
