"""Preparing a corpus costs little more than the tokenizer itself.

For a corpus and a tokenizer of your own: python -m tests.test_data_speed CORPUS.txt TOKENIZER_FOLDER [ROUNDS]
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

import pytest

from oelm.data import prepare
from oelm.data.tokenizer import load_tokenizer
from tests.support.corpus import SEPARATOR, documents, gpt2_folder, write_corpus


def speed_ratios(corpus: Path, tokenizer: Path, rounds: int) -> list[float]:
    """The time of bare `encode_batch` in a loop over that of `prepare`, tokenizer, hashes and files included."""
    backend = load_tokenizer(tokenizer).backend
    load_tokenizer(tokenizer).save(Path(tempfile.mkdtemp()))  # imports what saving needs, once
    text = corpus.read_text(encoding="utf-8")
    texts = text.split(SEPARATOR) if SEPARATOR in text else text.splitlines(keepends=True)
    ratios = []
    for _ in range(rounds):
        start = time.perf_counter()
        for place in range(0, len(texts), 1000):
            for encoding in backend.encode_batch(texts[place : place + 1000], add_special_tokens=False):
                len(encoding.ids)
        bare = time.perf_counter() - start
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            prepare(corpus, Path(folder) / "out", tokenizer, val_fraction=0)
            ratios.append(bare / (time.perf_counter() - start))
    return ratios


@pytest.mark.slow
def test_preparing_keeps_nine_tenths_of_the_speed_of_the_tokenizer(tmp_path):
    corpus = write_corpus(tmp_path / "a.txt", documents(12_000))
    assert statistics.median(speed_ratios(corpus, gpt2_folder(tmp_path / "gpt2"), 5)) > 0.9


if __name__ == "__main__":
    found = speed_ratios(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 7)
    print(f"median {statistics.median(found):.2f}, from {min(found):.2f} to {max(found):.2f} in {len(found)} rounds")
