"""Measure how much of the tokenizer's speed remains when it prepares a corpus.

Run it in a checkout: python -m tests.data.corpus.measure_speed CORPUS.txt TOKENIZER_FOLDER [ROUNDS]
"""

import statistics
import sys
import tempfile
import time
from pathlib import Path

from oelm.data import prepare
from oelm.data.tokenizer import load_tokenizer
from tests.support.corpus import SEPARATOR


def speed_ratios(corpus: Path, tokenizer: Path, rounds: int) -> list[float]:
    """Return the time of `encode_batch` alone divided by that of `prepare` with everything it does, for each round."""
    backend = load_tokenizer(tokenizer).backend
    load_tokenizer(tokenizer).save(Path(tempfile.mkdtemp()))  # imports what saving needs, before anything is timed
    text = corpus.read_text(encoding="utf-8")
    texts = text.split(SEPARATOR) if SEPARATOR in text else text.splitlines(keepends=True)
    ratios = []
    for _ in range(rounds):
        start = time.perf_counter()
        for first in range(0, len(texts), 1000):
            for encoding in backend.encode_batch(texts[first : first + 1000], add_special_tokens=False):
                len(encoding.ids)
        encoding_alone = time.perf_counter() - start
        with tempfile.TemporaryDirectory() as folder:
            start = time.perf_counter()
            prepare(corpus, Path(folder) / "out", tokenizer, val_fraction=0)
            ratios.append(encoding_alone / (time.perf_counter() - start))
    return ratios


if __name__ == "__main__":
    ratios = speed_ratios(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 7)
    print(
        f"median {statistics.median(ratios):.2f}, from {min(ratios):.2f} to {max(ratios):.2f} in {len(ratios)} rounds"
    )
