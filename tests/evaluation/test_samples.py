"""Texts that a model writes: how they are scored, and what a run keeps of them."""

import json

import pytest
import torch

from oelm.errors import ConfigError
from oelm.evaluation.generate import Sampling, Writer
from oelm.evaluation.samples import Judge, read_prompts, sample_texts
from oelm.evaluation.text_quality import distinct, repetition, self_bleu, split_words
from oelm.runs.folder import check_records
from oelm.runs.schema import Samples, read
from oelm.training.engine import train
from tests.support.lab import lab, refusal
from tests.support.training import config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    chosen = config(tmp_path_factory.mktemp("runs"), train={"max_steps": 3})
    train(chosen, quiet=True)
    return chosen.folder


def test_runs_of_words_are_counted():
    texts = [split_words("A b, a b!"), split_words("a")]
    assert texts[0] == ("a", "b", ",", "a", "b", "!")
    assert distinct(texts, 1) == 4 / 7
    assert distinct(texts, 2) == 4 / 5
    assert distinct([split_words("a")], 2) is None
    assert repetition([split_words("a b c d"), split_words("a b c d")]) == 0, "each text is taken by itself"
    assert repetition([split_words("a b c d a b c d")]) == pytest.approx(1 / 5)
    assert repetition([split_words("a b c")]) is None


def test_self_bleu_is_100_for_equal_texts_and_low_for_different_ones():
    same, other = "the cat sat on the mat .", "a dog ran far away from here !"
    assert self_bleu([[same, same]]) == pytest.approx(100)
    assert self_bleu([[same, other]]) < 10
    assert self_bleu([[same], [other]]) is None


def test_a_text_depends_on_its_own_prompt_alone(run):
    sampling = Sampling(tokens=8, temperature=1.0, top_k=0, seed=3)
    written = sample_texts(run, ["Once upon", "The dog"], 2, sampling, None)
    again = sample_texts(run, ["Anna had", "The dog"], 2, sampling, None)
    assert written.prompts[1] == again.prompts[1]
    assert written.prompts[0].texts[0] != written.prompts[0].texts[1]
    assert not any(text.startswith("The dog") for text in written.prompts[1].texts)


def test_a_judge_gives_the_perplexity_of_its_own_loss(run):
    judge = Judge("itself", Writer(run))
    loss, tokens = judge.loss("Once upon", " a time there was")
    ids = judge.writer.encode("Once upon a time there was")
    with torch.no_grad():
        logits = judge.writer.model(input_ids=ids).logits[0]
    given = judge.writer.encode("Once upon").shape[1]
    expected = torch.nn.functional.cross_entropy(logits[given - 1 : -1], ids[0, given:], reduction="sum")
    assert tokens == ids.shape[1] - given
    assert loss == pytest.approx(expected.item(), rel=1e-5)


def test_a_run_keeps_its_samples_and_their_scores(run):
    output = lab("generate", run, "--score", "--samples", 2, "--tokens", 12, "--judge", run).stdout
    kept = read(run / "samples.json", Samples)
    check_records(run)
    assert len(kept.prompts) == 8
    assert all(len(prompt.texts) == 2 for prompt in kept.prompts)
    assert kept.judge == str(run)
    assert 1 < kept.scores.judge_perplexity < 1000
    assert 0 < kept.scores.distinct[0] < kept.scores.distinct[2] <= 1
    assert "16 texts of 8 prompts" in output
    assert "perplexity under the judge" in output
    printed = lab("generate", run, "--score", "--samples", 2, "--tokens", 12, "--judge", run, "--json").stdout
    assert json.loads(printed)["prompts"] == [prompt.model_dump() for prompt in kept.prompts]


def test_prompts_that_cannot_be_read_are_named(run, tmp_path):
    (tmp_path / "empty.txt").write_text("\n \n")
    (tmp_path / "two.txt").write_text("Once upon\n\nThe dog\n")
    assert read_prompts(tmp_path / "two.txt") == ["Once upon", "The dog"]
    with pytest.raises(ConfigError, match="has no line with a prompt"):
        read_prompts(tmp_path / "empty.txt")
    assert "No such file" in refusal("generate", run, "--score", "--prompts", tmp_path / "none.txt")
    assert "goes with --score" in refusal("generate", run, "--prompts", tmp_path / "two.txt")
    assert "--prompts FILE" in refusal("generate", run / "best", "--score")
