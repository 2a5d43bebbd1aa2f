"""Text to text: encoder-decoders learn to write answers, with one kind of attention frozen or all kinds."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

import oelm
from oelm.errors import DataError
from oelm.evaluation.load import load_run
from oelm.evaluation.use import evaluate_run, predict_one
from oelm.models.small import small_model
from oelm.runs.folder import read_metrics
from oelm.training.engine import train
from oelm.training.tasks.open import open_task
from oelm.training.tasks.text2text import text_metrics
from tests.support.finetuning import fields, labelled_folder
from tests.support.training import read

pytest.importorskip("sacrebleu")


def text_run(output, family="t5", **changes):
    base = fields(output, task={"name": "builtin:sentiment", "form": "text"}, **changes)
    base["eval"]["generations"] = 20
    base["model"] = {"name": f"random:{family}"}
    return base


@pytest.mark.sample(2)
@pytest.mark.parametrize("family", ["t5", "bart"])
@pytest.mark.parametrize("attention", ["all", ["encoder"], ["decoder"], ["cross"]])
def test_answers_are_learned_and_scored(family, attention, tmp_path):
    method = {"preset": "oelm-freeze", "attention": attention}
    run = oelm.RunConfig.load(text_run(tmp_path, family, method=method, train={"max_steps": 20}))
    result = train(run, quiet=True)
    losses = [line.loss for line in read_metrics(run.folder) if line.kind == "train"]
    assert losses[-1] < losses[0]
    assert result["task"]["kind"] == "text2text"
    assert {"loss", "token_accuracy", "exact_match", "chrf", "bleu", "written"} <= set(result["last"])
    assert result["last"]["written"] == 20
    kinds = {row["kind"] for row in read(run.folder / "audit.json")["rows"] if row["frozen"] and row["role"] == "q"}
    assert kinds == ({"encoder", "decoder", "cross"} if attention == "all" else set(attention))
    oelm.verify(load_run(run.folder))


def test_the_loss_is_over_the_answers_tokens(tmp_path):
    task = open_task(oelm.RunConfig.load(text_run(tmp_path)))
    batch = task.batch(0, 16)
    assert task.target_count(0, 16) == int((batch["labels"] != -100).sum())
    assert task.token_count(0, 16) == task.target_count(0, 16) + int(batch["attention_mask"].sum())


def test_token_accuracy_counts_the_answers_tokens_that_are_most_likely(tmp_path):
    task = open_task(oelm.RunConfig.load(text_run(tmp_path)))
    batch = task.validation(0, 3, fill_to=4)
    labels = batch["labels"]
    counted = int((labels != -100).sum())

    class AllRightButTheFirst(torch.nn.Module):
        def prepare_decoder_input_ids_from_labels(self, labels):
            return labels.clamp(min=0)

        def forward(self, decoder_input_ids, **_):
            logits = torch.nn.functional.one_hot(decoder_input_ids, 200).float()
            logits[:, 0] = 0.0
            logits[:, 0, 199] = 1.0
            return SimpleNamespace(logits=logits)

    sums = task.loss(AllRightButTheFirst()).eval()(**batch)
    assert task.metrics(sums.tolist())["token_accuracy"] == pytest.approx((counted - 3) / counted)


@pytest.mark.full
def test_translations_are_learned_with_frozen_cross_attention(tmp_path):
    """In so few steps that is the beginning: what words there are, and which of them come first and last."""
    method = {"preset": "oelm-freeze", "attention": ["cross"]}
    changes = {"train": {"max_steps": 100, "batch_size": 32}, "optimizer": {"learning_rate": 3e-3}}
    base = text_run(tmp_path, method=method, eval={"every": 100, "sequences": 64}, **changes)
    run = oelm.RunConfig.load(base | {"task": {"name": "builtin:translation", "form": "text"}})
    result = train(run, quiet=True)
    assert result["token_accuracy"] == result["last"]["token_accuracy"] > 0.25
    answer = predict_one(run.folder, "a cat helped three dogs")["answer"]
    assert set(answer.split()) <= set(open_task(run).model_tokenizer.tokenizer.get_vocab())


@pytest.mark.full
def test_a_trained_model_writes_an_answer(tmp_path):
    run = oelm.RunConfig.load(text_run(tmp_path, train={"max_steps": 120, "batch_size": 32}, eval={"every": 60}))
    result = train(run, quiet=True)
    assert result["exact_match"] > 0.2, "it has learned to write one of two words"
    assert predict_one(run.folder, "the film is good")["answer"] in ("positive", "negative")
    assert evaluate_run(run.folder)["exact_match"] > 0.2


def test_a_user_can_name_the_source_and_target_columns(tmp_path):
    (tmp_path / "pairs").mkdir()
    for split, size in (("train", 60), ("validation", 12)):
        rows = "".join(f"film {split} good {i},story {i % 3}\n" for i in range(size))
        (tmp_path / f"pairs/{split}.csv").write_text(f"question,answer\n{rows}")
    from oelm.data.synthetic.judgements import judgement_tokenizer

    judgement_tokenizer().save_pretrained(tmp_path / "reader")
    columns = {"name": "folder", "form": "text", "source": "question", "target": "answer"}
    base = text_run(tmp_path, train={"max_steps": 4}, eval={"every": 4})
    base |= {"task": columns, "data": {"path": str(tmp_path / "pairs")}}
    base["model"]["tokenizer"] = str(tmp_path / "reader")
    result = train(oelm.RunConfig.load(base), quiet=True)
    assert result["last"]["written"] == 12
    assert any("12 validation target texts (100.0 %)" in warning for warning in result["warnings"])
    base["task"] = {**columns, "target": "reply"}
    with pytest.raises(DataError, match="reply"):
        open_task(oelm.RunConfig.load(base))


def test_the_scored_examples_do_not_depend_on_the_order_of_the_rows(tmp_path):
    """In a file sorted by answer, a model that always writes the first answer would have a perfect score."""
    from oelm.data.synthetic.judgements import judgement_tokenizer

    judgement_tokenizer().save_pretrained(tmp_path / "reader")
    scored = []
    for name, order in (("sorted", sorted), ("as-made", list)):
        base = text_run(tmp_path / f"runs-{name}", train={"max_steps": 2}, eval={"every": 2, "sequences": 30})
        folder = labelled_folder(tmp_path / name, ("source", "target"), order)
        base |= {"task": {"name": "folder", "form": "text"}, "data": {"path": str(folder)}}
        base["model"]["tokenizer"] = str(tmp_path / "reader")
        run = oelm.RunConfig.load(base)
        task = open_task(run)
        good, bad = task.score_answers(["good"] * 20), task.score_answers(["bad"] * 20)
        assert 0.2 < good["exact_match"] < 0.8
        assert good["exact_match"] + bad["exact_match"] == 1.0
        assert (good["written"], good["held_out"]) == (20, 100)
        rows = task.validation(0, 30, 30)
        texts = task.model_tokenizer.tokenizer.batch_decode(rows["input_ids"], skip_special_tokens=True)
        scored.append((good, texts, rows["labels"].tolist()))
        result = train(run, quiet=True)
        assert (result["last"]["written"], result["last"]["held_out"]) == (20, 100)
        assert "(20 of 100 answers)" in (run.folder / "train.log").read_text()
        assert evaluate_run(run.folder)["written"] == 100
    assert scored[0] == scored[1]


def test_answers_that_the_tokenizer_cannot_write_are_refused(tmp_path):
    """They would all be empty, and a model that writes nothing would match each of them."""
    from oelm.data.synthetic.judgements import judgement_tokenizer

    rows = "".join(f"the film is good {i},{i % 2}\n" for i in range(40))
    (tmp_path / "train.csv").write_text(f"source,target\n{rows}")
    judgement_tokenizer().save_pretrained(tmp_path / "reader")
    base = text_run(tmp_path) | {"task": {"name": "folder", "form": "text"}, "data": {"path": str(tmp_path)}}
    base["model"]["tokenizer"] = str(tmp_path / "reader")
    with pytest.raises(oelm.ConfigError, match=r"train: .*\d+ of \d+ answers.*'[01]'"):
        open_task(oelm.RunConfig.load(base))


def model_and_tokenizer(folder, name, **fields):
    """Save a tokenizer in a folder, and return a small model with its vocabulary."""
    from oelm.data.synthetic.judgements import judgement_tokenizer
    from oelm.models.small import small_model

    tokenizer = judgement_tokenizer()
    model = small_model(name, vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=tokenizer.sep_token_id, **fields)
    tokenizer.save_pretrained(folder)
    return model


@pytest.mark.full
def test_a_model_of_ones_own_is_fine_tuned_on_translations_with_its_own_tokenizer(tmp_path):
    """As `translate-t5-small` does with the Hub's; this tokenizer knows none of the words whole."""
    model = small_model("t5", vocab_size=400, pad_token_id=0, eos_token_id=1)
    model.save_pretrained(tmp_path / "t5")
    letters = {letter: index + 2 for index, letter in enumerate("abcdefghijklmnopqrstuvwxyz▁")}
    backend = Tokenizer(models.BPE({"<pad>": 0, "</s>": 1, **letters}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    backend.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="</s>").save_pretrained(
        tmp_path / "t5"
    )
    method = {"preset": "freeze-pretrained", "attention": ["cross"]}
    base = text_run(tmp_path, method=method, train={"max_steps": 2}, eval={"every": 2, "sequences": 8})
    base |= {"task": {"name": "builtin:translation", "form": "text"}, "model": {"name": str(tmp_path / "t5")}}
    base["data"] = {"sequence_length": 160, "fraction": 0.02}
    base["eval"]["generations"] = 2
    run = oelm.RunConfig.load(base)
    task = open_task(run)
    assert (task.train.targets.truncated, task.held_out.sources.truncated) == (0, 0)
    assert task.score_answers(["pusi"])["exact_match"] == 0.0
    train(run, quiet=True)
    trained = load_run(run.folder)
    oelm.verify(trained)
    for name, weight in model.named_parameters():
        if name.endswith(".q.weight"):
            assert torch.equal(trained.get_parameter(name), weight) == ("EncDecAttention" in name), name


def test_generation_settings_of_a_pretrained_model_are_dropped(tmp_path):
    model = model_and_tokenizer(tmp_path / "bart", "bart")
    model.generation_config.num_beams = 4
    model.generation_config.no_repeat_ngram_size = 3
    model.save_pretrained(tmp_path / "bart")
    run = oelm.RunConfig.load(text_run(tmp_path) | {"model": {"name": str(tmp_path / "bart")}})
    built = open_task(run).build_model(run)
    assert built.generation_config.num_beams == 1
    assert not built.generation_config.no_repeat_ngram_size


def test_a_t5_whose_checkpoint_lacks_a_layer_is_refused(tmp_path):
    model_and_tokenizer(tmp_path / "t5", "t5").save_pretrained(tmp_path / "t5")
    config = (tmp_path / "t5/config.json").read_text()
    (tmp_path / "t5/config.json").write_text(config.replace('"num_layers": 2', '"num_layers": 3'))
    run = oelm.RunConfig.load(text_run(tmp_path) | {"model": {"name": str(tmp_path / "t5")}})
    with pytest.raises(oelm.OelmError, match="weights are not in the checkpoint"):
        open_task(run).build_model(run)


def test_text_metrics_of_known_answers():
    metrics = text_metrics(["a cat sat", "dogs"], ["a cat sat", "cats"])
    assert metrics["exact_match"] == 0.5
    assert 0 < metrics["chrf"] < 100
    assert (
        text_metrics(["the same words here", "and here too"], ["the same words here", "and here too"])["chrf"] == 100.0
    )
    assert text_metrics([], []) == {}
