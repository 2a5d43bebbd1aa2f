"""Opening token files: content that does not match the header is refused, and the error names the file."""

import json
import subprocess
import sys

import numpy as np
import pytest

from oelm.data import DataError, TokenDataset, in_memory, prepare
from oelm.data.corpus.header import dtype_for
from tests.support.corpus import documents, gpt2_folder, write_corpus


@pytest.fixture
def prepared(tmp_path):
    corpus = write_corpus(tmp_path / "corpus.txt", documents(60))
    prepare(corpus, tmp_path / "out", gpt2_folder(tmp_path / "gpt2"), val_fraction=0.2)
    return tmp_path / "out"


def change_header(folder, **changes):
    header = json.loads((folder / "data.json").read_text())
    (folder / "data.json").write_text(json.dumps({**header, "sha256": None, **changes}))


def test_a_prepared_folder_opens(prepared):
    data = TokenDataset.open(prepared)
    assert isinstance(data.train.tokens, np.memmap)
    assert data.train.tokens.dtype == np.dtype("<u2")
    assert data.train.documents + data.val.documents == 60
    assert data.train.bytes + data.val.bytes == sum(len(text) for text in documents(60))
    assert (data.train.tokens == data.eos_id).sum() == data.train.documents
    assert 0.1 < len(data.val) / data.val.bytes < 1
    assert not data.synthetic
    data.verify()


def test_the_saved_tokenizer_decodes_the_tokens(prepared):
    data = TokenDataset.open(prepared)
    tokenizer = data.load_tokenizer()
    texts = tokenizer.decode(data.train.tokens.tolist()).split(tokenizer.eos_token)[:-1]
    texts += tokenizer.decode(data.val.tokens.tolist()).split(tokenizer.eos_token)[:-1]
    assert sorted(texts) == sorted(documents(60))


@pytest.mark.parametrize("name", ["train.bin", "val.bin"])
def test_a_truncated_file_is_named(prepared, name):
    path = prepared / name
    path.write_bytes(path.read_bytes()[:-2])
    with pytest.raises(DataError, match=rf"{name}: truncated"):
        TokenDataset.open(prepared)


def test_a_longer_file_and_a_missing_file_are_named(prepared):
    path = prepared / "train.bin"
    path.write_bytes(path.read_bytes() + b"\0\0")
    with pytest.raises(DataError, match=r"train.bin: too long"):
        TokenDataset.open(prepared)
    path.unlink()
    with pytest.raises(DataError, match=r"train.bin: missing"):
        TokenDataset.open(prepared)


def test_ids_outside_the_vocabulary_are_refused(prepared):
    size = (prepared / "train.bin").stat().st_size
    (prepared / "train.bin").write_bytes(b"\xff" * size)
    with pytest.raises(DataError, match="65535 is outside the vocabulary"):
        TokenDataset.open(prepared)


def test_verify_finds_a_changed_token(prepared):
    path = prepared / "val.bin"
    tokens = np.fromfile(path, dtype="<u2")
    tokens[5] = (tokens[5] + 1) % 500
    tokens.tofile(path)
    with pytest.raises(DataError, match=r"val.bin: the tokens have sha256"):
        TokenDataset.open(prepared).verify()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": "something"}, "not a header of this format"),
        ({"version": 99}, "version 99.* version 1"),
        ({"vocab_size": 3}, "outside the vocabulary of 3"),
        ({"dtype": "uint32"}, "train.bin: truncated"),
        ({"dtype": "float16"}, "dtype"),
        ({"extra": 1}, "unknown key"),
        ({"splits": {}}, "no 'train' split"),
    ],
)
def test_a_wrong_header_is_refused(prepared, changes, message):
    change_header(prepared, **changes)
    with pytest.raises(DataError, match=message):
        TokenDataset.open(prepared)


def test_an_empty_split_is_refused(prepared):
    header = json.loads((prepared / "data.json").read_text())
    header["splits"]["val"]["tokens"] = 0
    (prepared / "val.bin").write_bytes(b"")
    change_header(prepared, splits=header["splits"])
    with pytest.raises(DataError, match=r"val.bin: holds no tokens"):
        TokenDataset.open(prepared)


def test_folders_without_a_dataset_are_refused(tmp_path, prepared):
    with pytest.raises(DataError, match="no such folder"):
        TokenDataset.open(tmp_path / "nowhere")
    with pytest.raises(DataError, match=r"data.json is missing"):
        TokenDataset.open(tmp_path)
    (prepared / "data.json").write_text("{")
    with pytest.raises(DataError, match=r"data.json: cannot be read"):
        TokenDataset.open(prepared)


def test_another_tokenizer_in_the_folder_is_refused(prepared):
    path = prepared / "tokenizer" / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["merges"] = content["model"]["merges"][:-1]
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="this tokenizer has sha256"):
        TokenDataset.open(prepared).load_tokenizer()
    path.unlink()
    with pytest.raises(DataError, match=r"no tokenizer.json"):
        TokenDataset.open(prepared).load_tokenizer()


def test_a_dataset_can_be_made_from_arrays_in_memory():
    data = in_memory(range(100), [1, 2, 3], vocab_size=100, documents=(4, 1))
    assert (len(data.train), len(data.val), data.train.documents) == (100, 3, 4)
    assert in_memory([1, 2], vocab_size=9).val is None
    assert in_memory([1, 2], vocab_size=2**16 + 1).train.tokens.dtype == np.dtype("<u4")
    data.verify()
    with pytest.raises(ValueError, match="read-only"):
        data.train.tokens[0] = 5
    with pytest.raises(DataError, match="without a tokenizer"):
        data.load_tokenizer()


@pytest.mark.parametrize("ids", [[], [1.5], [[1], [2]], [-1, 2], [1, 10]])
def test_bad_arrays_are_refused(ids):
    with pytest.raises(DataError, match="tokens in memory"):
        in_memory(ids, vocab_size=10)


def test_the_dtype_holds_the_vocabulary():
    assert [dtype_for(size) for size in (2, 2**16, 2**16 + 1)] == ["uint16", "uint16", "uint32"]
    assert dtype_for(5, "uint32") == "uint32"
    with pytest.raises(DataError, match=r"'uint16' .*65,536.*70,000"):
        dtype_for(70_000, "uint16")
    with pytest.raises(DataError, match="dtype 'int8'"):
        dtype_for(5, "int8")


def test_importing_the_data_layer_loads_neither_torch_nor_transformers():
    code = "import sys, oelm.data; oelm.data.builtin(documents=5, val_documents=1); print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "datasets", "pyarrow", "rich"} & set(result.stdout.split())
