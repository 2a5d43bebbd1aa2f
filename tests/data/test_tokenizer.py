"""Tokenizers: loaded from every kind of folder or by name, trained, and identified by their hash."""

import json
import subprocess
import sys

import pytest
import transformers
from tokenizers import Tokenizer

from oelm.data import DataError, load_model_tokenizer, stories
from oelm.data.tokenizer import load_tokenizer, train_bpe, vocabulary_sha256
from tests.support.corpus import SEPARATOR, gpt2_folder

TEXT = "Mia had a red kite.\n\nIt's 3 o'clock — schön!  Tom   laughed."


@pytest.fixture
def gpt2(tmp_path):
    return gpt2_folder(tmp_path / "gpt2")


def test_a_tokenizer_is_loaded_from_gpt2s_two_files(gpt2):
    tokenizer = load_tokenizer(gpt2)
    assert tokenizer.vocab_size == 600
    assert tokenizer.backend.decode(tokenizer.backend.encode(TEXT).ids) == TEXT
    assert tokenizer.eos_id == tokenizer.backend.token_to_id(SEPARATOR)
    assert tokenizer.backend.encode(f"a{SEPARATOR}").ids[-1] == tokenizer.eos_id
    assert tokenizer.name == "gpt2"


def test_the_ids_equal_those_of_the_gpt2_tokenizer_of_transformers(gpt2):
    reference = transformers.GPT2Tokenizer(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt"))
    ours = load_tokenizer(gpt2)
    for text in (TEXT, *stories(1, 5)):
        assert ours.backend.encode(text).ids == reference(text).input_ids
    assert ours.sha256 == vocabulary_sha256(reference.backend_tokenizer)


def test_saving_and_loading_keeps_the_hash(gpt2, tmp_path):
    tokenizer = load_tokenizer(gpt2)
    tokenizer.save(tmp_path / "saved")
    loaded = load_tokenizer(tmp_path / "saved")
    assert (loaded.sha256, loaded.eos_id, loaded.vocab_size) == (tokenizer.sha256, tokenizer.eos_id, 600)
    (tmp_path / "saved" / "tokenizer_config.json").unlink()
    assert load_tokenizer(tmp_path / "saved").sha256 == tokenizer.sha256


def test_the_hash_changes_with_the_tokenizer(gpt2):
    before = load_tokenizer(gpt2).sha256
    merges = (gpt2 / "merges.txt").read_text().splitlines()
    merges[5], merges[6] = merges[6], merges[5]
    (gpt2 / "merges.txt").write_text("\n".join(merges) + "\n")
    assert load_tokenizer(gpt2).sha256 != before
    trained = train_bpe(stories(0, 50), 400)
    assert trained.sha256 != train_bpe(stories(0, 50), 401).sha256


def test_truncation_of_a_published_tokenizer_is_switched_off(gpt2, tmp_path):
    tokenizer = load_tokenizer(gpt2)
    plain = tokenizer.sha256
    tokenizer.backend.enable_truncation(max_length=4)
    tokenizer.backend.enable_padding(length=8, pad_token=SEPARATOR)
    (tmp_path / "cut").mkdir()
    tokenizer.backend.save(str(tmp_path / "cut" / "tokenizer.json"))
    loaded = load_tokenizer(tmp_path / "cut")
    assert len(loaded.backend.encode(TEXT).ids) > 8
    assert loaded.sha256 == plain


def test_a_hub_name_is_loaded_by_transformers(gpt2, monkeypatch):
    hub_tokenizer = transformers.GPT2Tokenizer(str(gpt2 / "vocab.json"), str(gpt2 / "merges.txt"))
    monkeypatch.setattr(
        transformers.AutoTokenizer, "from_pretrained", lambda name, **_: {"owner/name": hub_tokenizer}[name]
    )
    tokenizer = load_tokenizer("owner/name")
    assert tokenizer.name == "owner/name"
    assert tokenizer.sha256 == load_tokenizer(gpt2).sha256


def test_a_hub_name_that_cannot_be_loaded_is_refused(monkeypatch):
    def fail(name, **_):
        raise OSError("We couldn't connect\nto anything")

    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", fail)
    with pytest.raises(DataError, match=r"tokenizer 'owner/name': cannot be loaded \(We couldn't connect\)"):
        load_tokenizer("owner/name")
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name, **_: object())
    with pytest.raises(DataError, match="not a fast tokenizer"):
        load_tokenizer("owner/name")


def test_folders_without_a_tokenizer_are_refused(tmp_path, gpt2):
    with pytest.raises(DataError, match=r"tokenizer\.json.* vocab\.json and merges\.txt"):
        load_tokenizer(tmp_path)
    with pytest.raises(DataError, match="no such folder"):
        load_tokenizer("./nowhere")
    with pytest.raises(DataError, match="a file; name the folder"):
        load_tokenizer(gpt2 / "vocab.json")
    (gpt2 / "vocab.json").write_text("[]")
    with pytest.raises(DataError, match="are not a BPE"):
        load_tokenizer(gpt2)


def test_the_end_of_text_token_is_detected_or_named(tmp_path, gpt2):
    assert load_tokenizer(gpt2, eos="!").eos_id == load_tokenizer(gpt2).backend.token_to_id("!")
    with pytest.raises(DataError, match="has no token '<eos>'"):
        load_tokenizer(gpt2, eos="<eos>")
    content = json.loads(load_tokenizer(gpt2).backend.to_str())
    content["added_tokens"][0]["content"] = "[SEP]"
    content["model"]["vocab"]["[SEP]"] = content["model"]["vocab"].pop(SEPARATOR)
    (tmp_path / "none").mkdir()
    (tmp_path / "none" / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"eos .*'\[SEP\]'"):
        load_tokenizer(tmp_path / "none")
    assert load_tokenizer(tmp_path / "none", eos="[SEP]").eos_id == 0


def test_training_does_not_depend_on_the_number_of_threads():
    code = "from oelm.data.tokenizer import train_bpe; from oelm.data import stories\n"
    code += "print(train_bpe(stories(0, 300), 800).sha256)"
    expected = train_bpe(stories(0, 300), 800).sha256
    for threads in ("1", "3"):
        env = {"RAYON_NUM_THREADS": threads, "PYTHONHASHSEED": threads}
        result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=env)
        assert result.stdout.strip() == expected


def test_a_trained_tokenizer_encodes_every_byte():
    trained = train_bpe(stories(0, 5), 257)
    assert trained.vocab_size == 257
    text = "日本 ☃ \x00\t"
    assert trained.backend.decode(trained.backend.encode(text).ids) == text
    with pytest.raises(DataError, match="at least 257"):
        train_bpe(stories(0, 5), 256)


def test_saving_does_not_change_the_tokenizer(gpt2, tmp_path):
    tokenizer = load_tokenizer(gpt2)
    before = tokenizer.backend.to_str()
    tokenizer.save(tmp_path / "saved")
    assert tokenizer.backend.to_str() == before
    assert isinstance(tokenizer.backend, Tokenizer)


BERT = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "the", "film", "was", "fine", "##st", "."]


def test_a_bert_tokenizer_is_built_from_its_word_list(tmp_path):
    (tmp_path / "vocab.txt").write_text("\n".join(BERT) + "\n")
    tokenizer = load_model_tokenizer(tmp_path)
    encoded = tokenizer("The FILM was finest.", "the film")
    assert tokenizer.convert_ids_to_tokens(encoded.input_ids) == [
        "[CLS]", "the", "film", "was", "fine", "##st", ".", "[SEP]", "the", "film", "[SEP]"
    ]  # fmt: skip
    assert encoded.token_type_ids == [0] * 8 + [1] * 3
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": false}')
    assert load_model_tokenizer(tmp_path)("The").input_ids[1] == 1
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "vocab.txt").write_text("\n".join([*BERT, "The"]) + "\n")
    assert load_model_tokenizer(tmp_path)("The").input_ids[1] == len(BERT), (
        "a word list with capitals was taken as uncased"
    )
    (tmp_path / "vocab.txt").write_text("the\nfilm\n")
    with pytest.raises(DataError, match=r"vocab.txt: .*no \[PAD\]"):
        load_model_tokenizer(tmp_path)


def test_a_gpt2_tokenizer_is_built_from_its_two_files(tmp_path):
    folder = gpt2_folder(tmp_path / "gpt2")
    tokenizer = load_model_tokenizer(folder)
    assert tokenizer.eos_token == SEPARATOR
    reference = transformers.GPT2Tokenizer(str(folder / "vocab.json"), str(folder / "merges.txt"))
    assert tokenizer("It's fine.").input_ids == reference("It's fine.").input_ids


def test_a_models_tokenizer_is_loaded_or_refused(tmp_path, monkeypatch):
    (tmp_path / "vocab.txt").write_text("\n".join(BERT) + "\n")
    built = load_model_tokenizer(tmp_path)
    built.save_pretrained(tmp_path / "saved")
    (tmp_path / "empty").mkdir()
    loaded = load_model_tokenizer(str(tmp_path / "saved"))
    assert loaded("the film", "was fine").data == built("the film", "was fine").data
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name, **_: {"owner/name": built}[name])
    assert load_model_tokenizer("owner/name") is built
    with pytest.raises(DataError, match="tokenizer 'owner/none': cannot be loaded"):
        load_model_tokenizer("owner/none")
    with pytest.raises(DataError, match=r"tokenizer\.json, vocab\.txt.* vocab\.json and merges\.txt"):
        load_model_tokenizer(tmp_path / "empty")
    for missing in (tmp_path / "nowhere", "./nowhere"):
        with pytest.raises(DataError, match="no such folder"):
            load_model_tokenizer(missing)
