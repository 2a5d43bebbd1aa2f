"""Let a model continue several prompts, several times each, and score what it wrote."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from ..errors import ConfigError
from ..runs.environment import config_of, is_run
from ..runs.folder import SAMPLES, changing_record
from ..runs.schema import SampledPrompt, Samples, TextScores
from ..training.best import model_step
from ..training.tasks.text import open_dataset
from .generate import Sampling, Writer
from .load import model_folder
from .text_quality import distinct, repetition, self_bleu, split_words

# Without prompts of the caller's own: so many documents of the validation text, and so many of their first tokens.
_DOCUMENTS, _PROMPT_TOKENS = 8, 16
# The seeds of a run's prompts follow each other, and those of another seed begin so much later.
_SEEDS = 1_000_003

Show = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Judge:
    """Another language model, which says how likely it finds a text."""

    name: str
    writer: Writer

    @classmethod
    def load(cls, source: Path) -> Judge:
        return cls(str(source), Writer(source))

    @torch.inference_mode()
    def loss(self, prompt: str, text: str) -> tuple[float, int]:
        """Return the summed loss of a prompt's continuation, and the number of its tokens as this model cuts them."""
        given = self.writer.encode(prompt).shape[1]
        ids = self.writer.encode(prompt + text)[:, : self.writer.positions]
        logits = self.writer.model(input_ids=ids, use_cache=False).logits[0, :-1].float()
        losses = F.cross_entropy(logits, ids[0, 1:], reduction="none")[given - 1 :]
        return float(losses.sum()), losses.numel()


def sample_texts(
    source: Path,
    prompts: Sequence[str] | None,
    samples: int,
    sampling: Sampling,
    judge: Path | None,
    show: Show = lambda description, done, total: None,
) -> Samples:
    """Return texts by the model of a run or of a folder, with their scores. `show` is told how many prompts are done.

    `prompts` None means the beginnings of a run's validation documents. Every prompt has a seed of its own, so that a
    text does not depend on the prompts before it.
    """
    chosen = list(prompts) if prompts is not None else list(_beginnings(source))
    writer = Writer(source)
    by_prompt = []
    for number, prompt in enumerate(chosen):
        show("prompts", number, len(chosen))
        own_seed = replace(sampling, seed=(sampling.seed * _SEEDS + number) % 2**64)
        by_prompt.append(SampledPrompt(prompt=prompt, texts=_continuations(writer, prompt, own_seed, samples)))
    show("prompts", len(chosen), len(chosen))
    scores = _score(by_prompt, None if judge is None else Judge.load(judge))
    folder = model_folder(source, last=False) if is_run(source) else None
    return Samples(
        model=source.name if folder is None else folder.name,
        step=None if folder is None else model_step(folder),
        tokens=sampling.tokens,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        seed=sampling.seed,
        judge=None if judge is None else str(judge),
        scores=scores,
        prompts=by_prompt,
    )


def keep_samples(run: Path, written: Samples) -> Path:
    """Write texts into the folder of their run, in place of earlier ones, and return the file."""
    with changing_record(run, SAMPLES) as path:
        written.write(path)
    return path


def read_prompts(path: Path) -> list[str]:
    """Return the lines of a text file that are not empty, each a prompt."""
    try:
        prompts = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--prompts {path}: {getattr(error, 'strerror', None) or 'not a text in UTF-8'}") from None
    if not prompts:
        raise ConfigError(f"--prompts {path}: has no line with a prompt")
    return prompts


def _beginnings(source: Path) -> Iterator[str]:
    """Yield the beginnings of the first documents of a run's validation text that are longer than a prompt."""
    if not is_run(source):
        raise ConfigError(
            f"{source}: not a run with a validation text; name a file with a prompt a line: --prompts FILE"
        )
    config = config_of(source)
    if config.task.name != "language" or config.data.path is None:
        raise ConfigError(f"{source}: trained on {config.task.name}, not to continue a text")
    data = open_dataset(config.data.path)
    tokenizer: Any = data.load_tokenizer()
    tokens = np.asarray(data.val.tokens) if data.val is not None else np.zeros(0, dtype=np.int64)
    starts = [0, *(np.flatnonzero(tokens == data.eos_id) + 1)]
    ends = [*starts[1:], len(tokens)]
    long = [start for start, end in zip(starts, ends, strict=True) if end - start > _PROMPT_TOKENS + 1]
    for start in long[:_DOCUMENTS]:
        yield str(tokenizer.decode(tokens[start : start + _PROMPT_TOKENS].tolist()))


def _continuations(writer: Writer, prompt: str, sampling: Sampling, samples: int) -> list[str]:
    ids = writer.encode(prompt)
    generated, kept = writer.continue_ids(ids, sampling, samples)
    return [_new_text(writer, row, kept) for row in generated]


def _new_text(writer: Writer, row: Tensor, kept: int) -> str:
    """Return what a row adds to its prompt; decoded alone, it would lose the space that it begins with."""
    whole, prompt = writer.decode(row), writer.decode(row[:kept])
    return whole.removeprefix(prompt) if whole.startswith(prompt) else writer.decode(row[kept:])


def _score(by_prompt: Sequence[SampledPrompt], judge: Judge | None) -> TextScores:
    words = [split_words(text) for prompt in by_prompt for text in prompt.texts]
    return TextScores(
        words=sum(map(len, words)),
        distinct=[distinct(words, n) for n in (1, 2, 3)],
        repetition=repetition(words),
        self_bleu=self_bleu([prompt.texts for prompt in by_prompt]),
        judge_perplexity=None if judge is None else _perplexity(by_prompt, judge),
    )


def _perplexity(by_prompt: Sequence[SampledPrompt], judge: Judge) -> float | None:
    """Return the judge's perplexity over all texts; None where it has read no token of them."""
    losses = [judge.loss(prompt.prompt, text) for prompt in by_prompt for text in prompt.texts if text.strip()]
    tokens = sum(count for _, count in losses)
    return math.exp(sum(loss for loss, _ in losses) / tokens) if tokens else None
