"""The built-in stories: reproducible, generated once, and with answers that follow from earlier text alone."""

import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
import pytest

from oelm.data import DataError, builtin, stories
from oelm.data.synthetic import story_corpus
from oelm.data.synthetic.random_choices import RandomChoices
from oelm.data.synthetic.stories import annotated_stories
from oelm.data.synthetic.story_corpus import story_tokenizer

NAME = r"([A-Z][a-z]+)"
# How a reader understands the sentences, written independently of the generator.
HAS = [
    rf"{NAME} had a (\w+) (\w+)\.$",
    rf"{NAME} was very proud of a (\w+) (\w+)\.",
    rf"{NAME} came with a (\w+) (\w+)\.",
    rf"From a trip {NAME} had brought home a (\w+) (\w+)\.",
]
HAS_REVERSED = [rf"There was a (\w+) (\w+) in the hands of {NAME}\.", rf"A (\w+) (\w+) belonged to {NAME}\."]
GIVES = [rf"{NAME} gave the (\w+) to {NAME}\.", rf"{NAME} was kind and let {NAME} have the (\w+)\."]
GETS = [rf"{NAME} asked for the (\w+), and {NAME} said yes", rf"{NAME} got the (\w+) from {NAME}\."]
PUTS = [r"put the (\w+) (\w+ the \w+)\.", r"keep the (\w+) safe, \w+ left it (\w+ the \w+)\."]
PUTS += [r"hid the (\w+) (\w+ the \w+)\.", r"the (\w+) was laid (\w+ the \w+) by"]
PETS = [r"had a (\w+) called (\w+)", r"care of a (\w+) whose name was (\w+)"]
PETS_REVERSED = [r"came (\w+), a small (\w+)", r"(\w+) was the (\w+) of"]
FOODS = [rf"{NAME} liked (\w+) more", rf"{NAME} could eat (\w+) all"]
FOODS_REVERSED = [rf"If there was (\w+) at home, {NAME}"]


def understand(before: str) -> dict[str, dict[str, str]]:
    """Return the facts that a reader of this text knows."""
    owner, colour, spot, pet, food = {}, {}, {}, {}, {}
    for sentence in re.split(r"(?<=[.!?\"]) ", before):
        for form in HAS:
            if match := re.search(form, sentence):
                owner[match[3]], colour[match[3]] = match[1], match[2]
        for form in HAS_REVERSED:
            if match := re.search(form, sentence):
                owner[match[2]], colour[match[2]] = match[3], match[1]
        if match := re.search(GIVES[0], sentence):
            owner[match[2]] = match[3]
        if match := re.search(GIVES[1], sentence):
            owner[match[3]] = match[2]
        for form in GETS:
            if match := re.search(form, sentence):
                owner[match[2]] = match[1]
        for form in PUTS:
            if match := re.search(form, sentence):
                spot[match[1]] = match[2].rpartition(" ")[2]
        for form in PETS:
            if match := re.search(form, sentence):
                pet[match[1]] = match[2]
        for form in PETS_REVERSED:
            if match := re.search(form, sentence):
                pet[match[2]] = match[1]
        for form in FOODS:
            if match := re.search(form, sentence):
                food[match[1]] = match[2]
        for form in FOODS_REVERSED:
            if match := re.search(form, sentence):
                food[match[2]] = match[1]
        if match := re.search(rf"The best food in the world for {NAME} was (\w+)", sentence):
            food[match[1]] = match[2]
    return {"owner": owner, "colour": colour, "spot": spot, "pet": pet, "food": food}


def test_earlier_text_alone_gives_every_answer():
    kinds = Counter()
    for story in annotated_stories(11, 400):
        for recall in story.recalls:
            before = story.text[: recall.start]
            answer = story.text[recall.start : recall.end]
            known = understand(before)[recall.kind]
            # The question names what is asked for: it is the last such name before the answer.
            asked_for = max(
                known, key=lambda name, text=before: [m.start() for m in re.finditer(rf"\b{name}\b", text)][-1]
            )
            assert answer == known[asked_for], (recall, story.text)
            assert len(set(known.values())) > 1 or recall.kind == "owner", "there is no other candidate"
            assert re.search(rf"\b{answer}\b", before), "the answer was never mentioned"
            kinds[recall.kind] += 1
    assert min(kinds.values()) > 50, kinds
    assert set(kinds) == {"owner", "colour", "spot", "pet", "food"}


@pytest.mark.full
def test_the_four_words_before_an_answer_do_not_predict_it():
    """Counting what follows four words predicts half of the other words, but few of the recalled ones."""
    next_words: dict[tuple[str, ...], Counter[str]] = defaultdict(Counter)
    split = re.compile(r"[A-Za-z]+|[^\sA-Za-z]")
    for text in stories(0, 3000):
        words = ["", "", "", "", *split.findall(text)]
        for index in range(4, len(words)):
            next_words[tuple(words[index - 4 : index])][words[index]] += 1
    correct_guesses: dict[bool, list[bool]] = {True: [], False: []}
    for story in annotated_stories(1, 200):
        starts = {recall.start for recall in story.recalls}
        words = ["", "", "", ""]
        for match in split.finditer(story.text):
            counts = next_words.get(tuple(words[-4:]))
            guess = counts.most_common(1)[0][0] if counts else ""
            correct_guesses[match.start() in starts].append(guess == match[0])
            words.append(match[0])
    assert np.mean(correct_guesses[True]) < 0.2
    assert np.mean(correct_guesses[False]) > 0.4


def test_the_same_seed_gives_the_same_stories_and_a_smaller_count_gives_the_first_of_them():
    assert list(stories(3, 20)) == list(stories(3, 30))[:20]
    assert list(stories(3, 5)) != list(stories(4, 5))
    assert len(set(stories(0, 2000))) == 2000


def test_stories_do_not_depend_on_the_process():
    code = "from oelm.data import builtin; print(builtin(documents=50, val_documents=5).sha256)"
    for hash_seed in ("1", "2"):
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": hash_seed}
        )
        assert result.stdout.strip() == builtin(documents=50, val_documents=5).sha256


def test_the_builtin_corpus_is_small_and_synthetic(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # it is generated, not read from the cache
    data = builtin()
    assert data.sha256 == "8c09902e69874bc6b66e3b511169c21cea6b1310aab0ef66b9a79180440716d7", "records have this hash"
    assert data.synthetic
    assert "synthetic" in data.description
    assert 1_000_000 < len(data.train) < 2_000_000
    assert data.vocab_size <= 1024
    assert data.val is not None
    assert data.train.tokens.max() < data.vocab_size
    assert (data.train.tokens == data.eos_id).sum() == data.train.documents == 6000
    unknown = story_tokenizer().token_to_id("<unk>")
    assert unknown not in data.train.tokens


@pytest.fixture
def cache_folder(tmp_path, monkeypatch):
    """Return an empty cache folder, and have even small corpora stored in it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(story_corpus, "_CACHED_FROM", 1)
    return tmp_path / "oelm"


def fail_to_generate(*size):
    raise AssertionError("generated again")


def test_the_builtin_corpus_is_generated_once(cache_folder, monkeypatch):
    generated = builtin(documents=20, val_documents=2)
    with monkeypatch.context() as patch:
        patch.setattr(story_corpus, "_generate", fail_to_generate)
        cached = builtin(documents=20, val_documents=2)
        for change in ({"seed": 1}, {"documents": 21}, {"val_documents": 3}):
            with pytest.raises(AssertionError, match="generated again"):
                builtin(**({"documents": 20, "val_documents": 2} | change))
    assert cached.sha256 == generated.sha256
    assert (cached.train.bytes, cached.val.bytes, cached.description) == (
        generated.train.bytes,
        generated.val.bytes,
        generated.description,
    )
    assert cached.train.tokens.tolist() == generated.train.tokens.tolist()
    assert len(list(cache_folder.iterdir())) == 1


def test_changed_code_generates_the_corpus_anew(cache_folder, tmp_path, monkeypatch):
    builtin(documents=20, val_documents=2)
    changed = tmp_path / "words.py"
    changed.write_text("# other words")
    monkeypatch.setattr(story_corpus.words, "__file__", str(changed))
    monkeypatch.setattr(story_corpus, "_generate", fail_to_generate)
    with pytest.raises(AssertionError, match="generated again"):
        builtin(documents=20, val_documents=2)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[: len(data) // 2],
        lambda data: b"",
        lambda data: b"x" * 100,
        lambda data: data[:200] + bytes([data[200] ^ 1]) + data[201:],
    ],
)
def test_a_damaged_cache_file_is_replaced(cache_folder, damage):
    generated = builtin(documents=20, val_documents=2)
    (path,) = cache_folder.iterdir()
    whole = path.read_bytes()
    path.write_bytes(damage(whole))
    assert builtin(documents=20, val_documents=2).sha256 == generated.sha256
    assert path.read_bytes() == whole


def test_an_unwritable_cache_folder_is_no_error(cache_folder, monkeypatch):
    cache_folder.write_text("a file, so that no folder can be made")
    generated = builtin(documents=20, val_documents=2)
    assert cache_folder.is_file()
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", lambda: (_ for _ in ()).throw(RuntimeError("no home")))
    assert builtin(documents=20, val_documents=2).sha256 == generated.sha256


def test_processes_that_start_at_once_share_the_cache(cache_folder):
    code = (
        "from oelm.data.synthetic import story_corpus; story_corpus._CACHED_FROM = 1\n"
        "print(story_corpus.builtin(documents=200, val_documents=20).sha256)"
    )
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache_folder.parent)}
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
        for _ in range(3)
    ]
    hashes = {process.communicate()[0].strip() for process in processes}
    assert hashes == {builtin(documents=200, val_documents=20).sha256}
    assert [path.suffix for path in cache_folder.iterdir()] == [".npz"], "a temporary file was left"


def test_train_and_validation_share_no_story():
    data = builtin(documents=800, val_documents=200)
    tokenizer = data.load_tokenizer()
    train, val = (
        set(tokenizer.decode(split.tokens.tolist()).split("<|endoftext|>")[:-1]) for split in (data.train, data.val)
    )
    assert (len(train), len(val)) == (800, 200)
    assert not train & val
    assert builtin(seed=1, documents=20, val_documents=2).sha256 != builtin(documents=20, val_documents=2).sha256


def test_a_story_that_repeats_by_chance_stays_out_of_validation(monkeypatch):
    monkeypatch.setattr("oelm.data.synthetic.stories.stories", lambda seed, count: stories(seed // 2, count))
    data = builtin(documents=10, val_documents=5)
    tokenizer = data.load_tokenizer()
    val = tokenizer.decode(data.val.tokens.tolist()).split("<|endoftext|>")[:-1]
    assert val == list(stories(0, 15))[10:]


def test_the_tokenizer_restores_every_story_also_after_saving_and_loading(tmp_path):
    from transformers import AutoTokenizer

    data = builtin(documents=20, val_documents=2)
    tokenizer = data.load_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in stories(5, 20):
        ids = loaded(text, add_special_tokens=False).input_ids
        assert loaded.decode(ids) == text
        assert ids == tokenizer(text, add_special_tokens=False).input_ids
    assert loaded.eos_token_id == data.eos_id
    tokens = [token for text in stories(0, 20) for token in (*tokenizer(text).input_ids, data.eos_id)]
    assert data.train.tokens.tolist() == tokens, "the corpus has other ids than the tokenizer gives"
    assert next(stories(0, 1)) == loaded.decode(data.train.tokens[: list(data.train.tokens).index(data.eos_id)])


def test_a_pair_equals_a_sample_of_two():
    pairs, samples = RandomChoices("pairs"), RandomChoices("pairs")
    for size in (2, 3, 24) * 50:
        assert [*pairs.pair(range(size))] == samples.sample(range(size), 2)


def test_unknown_builtin_data_and_empty_corpora_are_refused():
    with pytest.raises(DataError, match="there is 'stories'"):
        builtin("poems")
    with pytest.raises(DataError, match="documents 0"):
        builtin(documents=0)
