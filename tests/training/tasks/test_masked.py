"""Masked language modelling: masks by number, every family's own head, whole runs, and settings that are refused."""

from __future__ import annotations

import json
import random
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertTokenizerFast, pipeline
from typer.testing import CliRunner

import oelm
from oelm.analysis.analyse import analyse
from oelm.analysis.load import load_run as load_record
from oelm.base.strict import merge
from oelm.cli.app import app
from oelm.config import RunConfig
from oelm.data import prepare, stories
from oelm.data.corpus.tokens import TokenDataset
from oelm.errors import OelmError
from oelm.evaluation.load import load_run
from oelm.evaluation.use import evaluate_run
from oelm.lab.status import read_state
from oelm.training.build import count_flops
from oelm.training.engine import train
from oelm.training.parallel import World
from oelm.training.tasks.base import IGNORED
from oelm.training.tasks.masked import MaskedLanguageModelling
from oelm.training.tasks.open import open_task
from tests.support.distributed import finish
from tests.support.training import (
    Death,
    assert_same_run,
    metrics_without_times,
    read,
    run_to_end,
    start,
    tiny,
    write_yaml,
)

LENGTH = 32
BERT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
FAMILIES = ["bert", "roberta", "distilbert", "electra", "albert", "deberta-v2", "modernbert"]


def fields(output: Path, **changes) -> dict:
    """Return the fields of a masked run that takes a fraction of a second: a BERT of 2 layers and width 32."""
    common = {**tiny(output), "task": {"name": "masked-language"}, "model": {"name": "random:bert", "fields": BERT}}
    return merge(common, changes)


def config(output: Path, **changes) -> RunConfig:
    return RunConfig.load(fields(output, **changes))


def opened(output: Path, **changes) -> MaskedLanguageModelling:
    task = open_task(config(output, **changes))
    assert isinstance(task, MaskedLanguageModelling)
    return task


def command(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run with frozen Q and K, and its result."""
    run = config(tmp_path_factory.mktemp("trained"), method="oelm-freeze", eval={"sequences": None, "targets": [390]})
    return run.folder, train(run, quiet=True)


# Batches


def test_a_batch_is_a_function_of_the_seed_and_the_sample_numbers(tmp_path):
    task, same, other = opened(tmp_path), opened(tmp_path, method="oelm-freeze"), opened(tmp_path, data={"seed": 5})
    whole = task.batch(3, 8)
    for name, rows in whole.items():
        assert torch.equal(rows, torch.cat([same.batch(3, 5)[name], same.batch(8, 3)[name]]))
        assert not torch.equal(rows, other.batch(3, 8)[name])
    again = task.batch(3 + task.samples_per_epoch, 1), task.batch(3, 1)
    assert not torch.equal(again[0]["positions"], again[1]["positions"]), "every epoch has masks of its own"


def test_all_batches_have_one_shape_and_their_targets_are_counted(tmp_path):
    task = opened(tmp_path)
    assert task.fixed_shapes
    for first in (0, 7, 10**6):
        batch = task.batch(first, 6)
        assert {name: tuple(rows.shape) for name, rows in batch.items()} == {
            "inputs": (6, LENGTH),
            "positions": (6, 5),
            "targets": (6, 5),
        }
        assert task.target_count(first, 6) == int((batch["targets"] != IGNORED).sum()) == 30


def test_the_masks_of_validation_are_those_of_every_run(tmp_path):
    task, other = opened(tmp_path, seed=0), opened(tmp_path, seed=1, method="oelm-freeze", data={"fraction": 0.5})
    for first, count, filled in ((0, 4, 6), (5, 3, 3), (0, 0, 2)):
        batch = task.validation(first, count, filled)
        assert all(torch.equal(rows, other.validation(first, count, filled)[name]) for name, rows in batch.items())
        assert (batch["targets"][count:] == IGNORED).all()
        assert (batch["targets"][:count] != IGNORED).all()
    assert torch.equal(task.validation(3, 1, 1)["inputs"][0], task.validation(0, 4, 4)["inputs"][3])


def test_the_mask_token_follows_the_datas_tokens_and_documents_ends_are_never_masked(tmp_path):
    task = opened(tmp_path, data={"path": "builtin:stories", "sequence_length": 64}, task={"mask_share": 1.0})
    assert task.masking.mask_id == task.data.vocab_size
    batch = task.batch(0, 50)
    assert task.data.eos_id not in batch["targets"]
    assert (batch["targets"] == IGNORED).any(), "a sequence with an end has a token less to predict"
    assert task.target_count(0, 50) == int((batch["targets"] != IGNORED).sum())
    ends = torch.from_numpy(task.windows.batch(0, 50)[:, :-1]) == task.data.eos_id
    assert torch.equal(batch["inputs"] == task.data.eos_id, ends)


# Models


def reference_loss(model, batch) -> float:
    """Return the summed loss from the logits of all positions, in plain code."""
    with torch.no_grad():
        logits = model(input_ids=batch["inputs"]).logits.double()
    losses = [
        F.cross_entropy(logits[row, position], target)
        for row in range(len(batch["inputs"]))
        for position, target in zip(batch["positions"][row], batch["targets"][row], strict=True)
        if target != IGNORED
    ]
    return float(sum(losses))


@pytest.mark.sample(3)
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_computes_its_own_head_at_the_masked_positions_alone(family, tmp_path):
    run = config(tmp_path)
    run = run.model_copy(update={"model": run.model.model_copy(update={"name": f"random:{family}", "fields": {}})})
    task = open_task(run)
    model = task.build_model(run).eval()
    assert type(model).__name__.endswith("ForMaskedLM")
    assert model.config.vocab_size == task.data.vocab_size + 1
    loss, batch = task.loss(model).train(), task.batch(0, 4)
    model.eval()  # no dropout
    expected = reference_loss(model, batch)
    with FlopCounterMode(display=False) as counter:
        summed = loss(**batch).detach()
    assert float(summed) == pytest.approx(expected, rel=1e-5)
    with FlopCounterMode(display=False) as in_full:
        whole = model(input_ids=batch["inputs"])
    assert whole.logits.shape[1] == LENGTH, "the model itself is as it was"
    assert counter.get_total_flops() < in_full.get_total_flops()
    oelm.apply(model, "oelm-freeze")
    loss(**batch).backward()
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_the_loss_is_compiled_as_one_graph(family, tmp_path):
    run = config(tmp_path)
    run = run.model_copy(update={"model": run.model.model_copy(update={"name": f"random:{family}", "fields": {}})})
    task = open_task(run)
    loss, batch = task.loss(task.build_model(run)).eval(), task.batch(0, 4)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager", fullgraph=True, dynamic=False)
    assert torch.allclose(compiled(**batch), loss(**batch))
    assert torch.allclose(compiled(**task.batch(4, 4)), loss(**task.batch(4, 4))), "positions are read anew"


@pytest.mark.parametrize("method", ["baseline", "oelm-freeze"])
def test_the_flops_of_a_run_equal_torchs(method, tmp_path):
    run = config(tmp_path, method=method, train={"micro_batch_size": 2})
    task = open_task(run)
    model = task.build_model(run)
    model.set_attn_implementation("eager")  # torch counts plain products, but not every fused attention
    oelm.apply(model, run.method)
    batch = task.batch(0, 2)
    with FlopCounterMode(display=False) as counter:
        task.loss(model)(**batch).backward()
    expected = counter.get_total_flops() / (2 * LENGTH)
    assert count_flops(run, World(0, 1, torch.device("cpu")), task, model) == pytest.approx(expected, rel=1e-9)


def test_a_small_random_model_has_the_positions_of_the_sequences_unless_its_fields_say_otherwise(tmp_path):
    def built(**model_fields):
        run = config(tmp_path, model={"fields": model_fields})
        return open_task(run).build_model(run)

    assert built().config.max_position_embeddings == LENGTH
    assert built(max_position_embeddings=100).config.max_position_embeddings == 100
    assert built().get_input_embeddings().padding_idx is None, "no token is left without a gradient"
    with pytest.raises(OelmError, match=r"data.sequence_length 32 is more than the model's 16 positions"):
        built(max_position_embeddings=16)


# Runs


def test_a_run_records_what_it_measured(trained):
    run, result = trained
    assert result["task"] == {"kind": "masked-language", "name": "masked-language"}
    assert result["masked_perplexity"] == pytest.approx(np.exp(result["val_loss"]))
    assert result["best_masked_perplexity"] == pytest.approx(np.exp(result["best_val_loss"]))
    assert 0 < result["token_accuracy"] < 1
    assert result["reached"]["390.0"]["step"] in (4, 8, 12)
    assert "perplexity" not in result["last"], "it is no perplexity of a text"
    assert read(run / "config.json")["task"]["mask_share"] == 0.15
    assert "masked ppl" in (run / "train.log").read_text()
    record = load_record(run)
    assert record.figure("best_masked_perplexity") == result["best_masked_perplexity"]
    assert read_state(run).masked_perplexity == result["masked_perplexity"]
    validations = [line for line in metrics_without_times(run) if line["kind"] == "val"]
    assert validations[-1]["masked_perplexity"] == result["masked_perplexity"]


def test_evaluation_gives_the_metrics_of_training(trained):
    run, result = trained
    evaluation = evaluate_run(run, batch_size=7)
    assert evaluation["val_loss"] == pytest.approx(result["best_val_loss"], abs=1e-5)
    assert evaluation["masked_perplexity"] == pytest.approx(result["best_masked_perplexity"], rel=1e-5)
    assert evaluation["token_accuracy"] == pytest.approx(result["best"]["token_accuracy"])


def test_the_validation_loss_is_that_of_the_logits_at_all_positions(trained):
    run, result = trained
    task = open_task(RunConfig.load(run / "config.json"))
    batch = task.validation(0, task.held_out_count, task.held_out_count)
    loss = reference_loss(load_run(run), batch) / int((batch["targets"] != IGNORED).sum())
    assert result["best_val_loss"] == pytest.approx(loss, rel=1e-5)


def test_frozen_q_and_k_are_as_they_were_made(trained):
    model = load_run(trained[0])
    assert oelm.verify(model).exact == 8, "weights and biases"
    frozen = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert {name for name in frozen if name.endswith("weight")} == {
        f"bert.encoder.layer.{layer}.attention.self.{role}.weight" for layer in (0, 1) for role in ("query", "key")
    }
    audit = read(trained[0] / "audit.json")
    assert {row["role"] for row in audit["rows"] if row["frozen"]} == {"q", "k"}


@pytest.mark.full
def test_a_run_that_is_killed_many_times_ends_the_same(tmp_path):
    changes = {
        "train": {"micro_batch_size": 4},
        "checkpoint": {"every": 3},
        "method": {"preset": "oelm-freeze", "schedule": {"kind": "unfreeze", "steps": [3, 7]}},
    }
    run_to_end("train", write_yaml(tmp_path / "whole.yaml", fields(tmp_path / "whole", **changes)))
    file = write_yaml(tmp_path / "killed.yaml", fields(tmp_path / "killed", **changes))
    draw, kills = random.Random(0), 0
    while (code := start("train", file, sabotage=Death(draw.randint(10, 90))).wait()) != 0:
        assert code == -signal.SIGKILL
        kills += 1
        assert kills < 40, "the run makes no progress"
    assert kills >= 3
    whole, killed = (config(tmp_path / name, **changes).folder for name in ("whole", "killed"))
    assert_same_run(killed, whole)


def test_accumulated_batches_give_the_same_losses(tmp_path):
    """Without dropout, which is drawn for each micro-batch. Some sequences have fewer targets than others."""
    changes = {
        "model": {"fields": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}},
        "task": {"mask_share": 1.0},
    }
    losses = []
    for micro in (8, 2):
        run = config(tmp_path / str(micro), **changes, train={"micro_batch_size": micro})
        train(run, quiet=True)
        losses.append([line["loss"] for line in metrics_without_times(run.folder) if line["kind"] in ("train", "val")])
    task = opened(tmp_path, **changes)
    assert len({task.target_count(sample, 1) for sample in range(96)}) > 1
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.full
@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_give_the_losses_of_one(parallel, tmp_path):
    without_dropout = {"fields": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}}
    changes = {"model": without_dropout, "method": "oelm-freeze", "train": {"parallel": parallel}}
    losses = []
    for size in (1, 2):
        run = finish(fields(tmp_path / str(size), **changes), size=size)
        losses.append([line["loss"] for line in metrics_without_times(run) if line["kind"] in ("train", "val")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.full
def test_a_small_model_learns_more_than_how_frequent_tokens_are(tmp_path):
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128}
    run = RunConfig.load(
        {
            "task": "masked-language",
            "model": {"name": "random:modernbert", "fields": small},
            "data": {"sequence_length": 64},
            "optimizer": {"learning_rate": 5e-3, "warmup_steps": 10},
            "train": {"max_steps": 150, "batch_size": 32, "device": "cpu"},
            "eval": {"every": 150, "sequences": 100},
            "checkpoint": {"every": 150, "best": False},
            "output": str(tmp_path),
        }
    )
    task = open_task(run)
    targets = task.validation(0, 100, 100)["targets"]
    text = np.asarray(task.data.train.tokens)
    frequencies = np.bincount(text[text != task.data.eos_id], minlength=task.data.vocab_size) / len(text)
    unigram = -float(np.log(frequencies[targets[targets != IGNORED]]).mean())
    assert train(run, quiet=True)["val_loss"] < unigram - 0.5


def test_test_text_is_judged_document_by_document(tmp_path):
    texts = list(stories(0, 60))
    for name, part in (("train", texts[:40]), ("val", texts[40:48]), ("test", texts[48:])):
        (tmp_path / f"{name}.txt").write_text("".join(f"{text}\n<|endoftext|>\n" for text in part), encoding="utf-8")
    files = {name: tmp_path / f"{name}.txt" for name in ("val", "test")}
    prepare(tmp_path / "train.txt", tmp_path / "tokens", train_bpe=300, workers=1, synthetic=True, **files)
    run = config(tmp_path / "runs", data={"path": str(tmp_path / "tokens")}, train={"max_steps": 4})
    test = train(run, quiet=True)["evaluations"]["test"]

    data, task = TokenDataset.open(tmp_path / "tokens"), open_task(run).other_splits()["test"]
    document_of = np.cumsum([0, *(np.asarray(data.test.tokens)[:-1] == data.eos_id)])
    model, losses, counts = load_run(run.folder), np.zeros(12), np.zeros(12, dtype=int)
    for row in range(task.held_out_count):
        batch = task.validation(row, 1, 1)
        for place in range(batch["positions"].shape[1]):
            one = {name: batch[name][:, place : place + 1] for name in ("positions", "targets")}
            document = document_of[row * LENGTH + int(one["positions"])]
            losses[document] += reference_loss(model, {"inputs": batch["inputs"], **one})
            counts[document] += 1
    assert test["document_tokens"] == counts.tolist()
    assert test["document_losses"] == pytest.approx(losses.tolist(), rel=1e-4)
    assert test["loss"] == pytest.approx(losses.sum() / counts.sum(), rel=1e-5)
    assert load_record(run.folder).figure("test_masked_perplexity") == test["masked_perplexity"]


# What is made of a run


def test_transformers_fills_masks_with_an_exported_run(trained, tmp_path):
    run, _ = trained
    result = command("export", run, tmp_path / "plain")
    assert result.exit_code == 0, result.output
    fill = pipeline("fill-mask", model=str(tmp_path / "plain"), device="cpu")
    assert fill.tokenizer.mask_token_id == fill.model.config.vocab_size - 1
    filled = fill("There was a [MASK] in the garden.")
    assert len(filled) == 5
    assert all("[MASK]" not in one["sequence"] and "in the garden." in one["sequence"] for one in filled)
    assert "fill-mask" in (tmp_path / "plain" / "README.md").read_text()


def test_a_pretrained_encoder_is_trained_further(trained, tmp_path):
    run, result = trained
    oelm.export(load_run(run), tmp_path / "plain")
    further = fields(tmp_path, method="freeze-pretrained", train={"max_steps": 1}, eval={"sequences": None})
    further |= {"model": {"name": str(tmp_path / "plain")}, "optimizer": {"learning_rate": 1e-12}}
    again = train(RunConfig.load(further), quiet=True)
    assert again["val_loss"] == pytest.approx(result["best_val_loss"], abs=1e-5)


def test_a_run_that_fills_masks_neither_writes_nor_predicts(trained, tmp_path):
    run, _ = trained
    for arguments in (("generate", run, "--prompt", "hello"), ("predict", run, "hello")):
        result = command(*arguments)
        assert result.exit_code == 2
        assert "trained to fill masks" in result.output.replace("\n", " ")
        assert "pipeline('fill-mask')" in result.output.replace("\n", " ")
    looked = command("look", run, "--text", "There was a garden.", "--out", tmp_path / "look")
    assert looked.exit_code == 0, looked.output


def test_runs_are_compared_by_their_masked_perplexity(trained, tmp_path):
    run, result = trained
    other = config(tmp_path, eval={"sequences": None, "targets": [390]})
    train(other, quiet=True)
    compared = command("compare", run, other.folder).output
    assert "masked perplexity" in compared
    assert "token accuracy" in compared
    assert "they differ only in the method" in compared
    analysis = analyse([run, other.folder])
    (comparison,) = analysis.comparisons
    assert comparison.measure.name == "masked_perplexity"
    assert comparison.pairs[0][0].figure("masked_perplexity") == result["masked_perplexity"]
    written = command("report", run, other.folder, "--out", tmp_path / "report", "--lang", "zh")
    assert written.exit_code == 0, written.output
    assert "掩码困惑度" in (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    drawn = {figure.stem.partition("-")[2] for figure in (tmp_path / "report" / "figures").iterdir()}
    assert {"change", "validation", "training"} <= drawn
    assert "accuracy" not in drawn, "its measure is no share"


# Tokenizers


@pytest.fixture(scope="module")
def word_pieces(tmp_path_factory):
    """Return token folders of BERT's kind of tokenizer, with the role of the mask token and without it."""
    folder = tmp_path_factory.mktemp("pieces")
    texts = list(stories(0, 80))
    words = sorted({word.strip(".,?!'\"").lower() for text in texts for word in text.split()} - {""})
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = [*special, ".", ",", "?", "!", "'", '"', *words]
    (folder / "vocab.txt").write_text("\n".join(vocabulary), encoding="utf-8")
    BertTokenizerFast(vocab=str(folder / "vocab.txt")).save_pretrained(folder / "tokenizer")
    (folder / "text.txt").write_text("".join(f"{text}\n<|endoftext|>\n" for text in texts), encoding="utf-8")
    options = {"tokenizer": str(folder / "tokenizer"), "eos": "[SEP]", "val_fraction": 0.1, "workers": 1}
    prepare(folder / "text.txt", folder / "with", **options)
    prepare(folder / "text.txt", folder / "without", **options)
    settings = read(folder / "without" / "tokenizer" / "tokenizer_config.json")
    assert settings.pop("mask_token") == "[MASK]"
    (folder / "without" / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
    return folder


@pytest.mark.parametrize("name", ["with", "without"])
def test_a_tokenizers_own_mask_token_is_used_and_special_tokens_are_never_masked(name, word_pieces, tmp_path):
    changes = {"data": {"path": str(word_pieces / name)}, "task": {"mask_share": 1.0, "mask_random_share": 0.2}}
    task = opened(tmp_path, **changes)
    assert task.masking.mask_id == 4
    assert len(task.masking.ordinary) == task.data.vocab_size, "no token is added"
    batch = task.batch(0, 64)
    masked = batch["targets"] != IGNORED
    assert not set(batch["targets"][masked].tolist()) & set(range(5))
    written = batch["inputs"].gather(1, batch["positions"])[masked]
    assert set(written.tolist()) & set(range(5)) == {4}, "no other special token replaces one"
    run = config(tmp_path, **changes)
    assert train(run, quiet=True)["masked_perplexity"] > 1
    roberta = run.model.model_copy(update={"name": "random:roberta", "fields": BERT})
    model = task.build_model(run.model_copy(update={"model": roberta}))
    assert (model.config.pad_token_id, model.config.max_position_embeddings) == (0, LENGTH + 1)


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": {"mask_share": 0}}, r"task.mask_share: .*greater than 0 \(got 0\)"),
        ({"task": {"mask_share": 1.5}}, r"task.mask_share: .*less than or equal to 1 \(got 1.5\)"),
        (
            {"task": {"mask_token_share": 0.9, "mask_random_share": 0.2}},
            "mask_random_share 0.2 are more than 1",
        ),
        ({"task": {"name": "language", "mask_share": 0.2}}, r"mask_share is a setting of the task 'masked-language'"),
        ({"task": {"form": "text"}}, "learns from running text"),
        ({"eval": {"choose": "accuracy"}}, "a metric of classification"),
        ({"data": {"sequence_length": 3}}, r"data.sequence_length 3: task.mask_share 0.15 of it is less than half"),
        ({"data": {"path": "nowhere"}}, "nowhere"),
        ({"model": {"fields": {"vocab_size": 50}}}, r"its vocabulary has 50 entries, .* has 401"),
        ({"model": {"fields": {"is_decoder": True}}}, r"random:bert: a bert is a decoder here"),
        ({"model": {"fields": {"pad_token_id": 7}}}, r"a bert pads texts with token 7, and in the data that is"),
    ],
)
def test_settings_that_do_not_fit_are_refused(changes, message, tmp_path):
    def build():
        run = config(tmp_path, **changes)
        open_task(run).build_model(run)

    with pytest.raises(OelmError, match=message):
        build()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gpt:tiny", "a oelm_gpt is a decoder here, which reads only what comes before a masked token"),
        ("random:gpt2", "a gpt2 is a decoder"),
        ("random:llama", "a llama is a decoder"),
        ("random:t5", "a t5 is an encoder-decoder"),
        ("random:bart", "a bart is an encoder-decoder"),
        ("random:vit", "a vit has no head that fills masks"),
        ("random:mpnet", r"a mpnet pads texts with token 1, and in the data that is '!'"),
    ],
)
def test_models_that_fill_no_masks_are_refused_by_name(name, message, tmp_path):
    run = RunConfig.load({**fields(tmp_path), "model": {"name": name}})
    with pytest.raises(OelmError, match=f"model.name {name}: {message}"):
        train(run, quiet=True)
    assert not run.folder.exists()


def test_a_pretrained_model_without_an_entry_for_the_mask_is_refused(trained, tmp_path):
    model = load_run(trained[0])
    model.resize_token_embeddings(400)
    oelm.export(model, tmp_path / "plain")
    run = RunConfig.load({**fields(tmp_path), "model": {"name": str(tmp_path / "plain")}})
    with pytest.raises(OelmError, match="has 400 entries, and the token file's, with a token for the mask, has 401"):
        train(run, quiet=True)


def test_a_config_of_another_task_does_not_know_of_masks(tmp_path):
    """So that the ids of runs do not depend on settings that change nothing for them."""
    assert "mask_share" not in RunConfig.load(tiny(tmp_path)).to_dict()["task"]
    run = config(tmp_path, task={"mask_share": 0.3})
    assert RunConfig.load(run.to_dict()) == run
    assert run.id != config(tmp_path).id
