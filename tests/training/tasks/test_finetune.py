"""Fine-tuning on built-in data: every method trains, frozen weights do not change, and the records are right."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import oelm
from oelm.cli import train as commands
from oelm.cli.app import app
from oelm.data import judgement_tokenizer
from oelm.errors import CheckpointError
from oelm.evaluation.load import load_run
from oelm.evaluation.use import evaluate_run, predict_one
from oelm.lab.status import read_state
from oelm.models.small import small_model
from oelm.runs.folder import read_metrics
from oelm.runs.schema import RecordedConfig
from oelm.training import engine
from oelm.training.checkpoint import list_checkpoints, named_tensors
from oelm.training.tasks.metrics import classification_metrics
from oelm.training.tasks.model_tokenizer import ModelTokenizer
from oelm.training.tasks.open import open_task
from tests.support.finetuning import config, fields, labelled_folder, run_here
from tests.support.training import Death, assert_same_run, final_tensors, read, run_to_end, start, write_yaml

METHODS = [
    "baseline",
    "freeze-pretrained",
    "oelm-freeze",
    "oelm-nofreeze",
    "oelm-polar",
    "oelm-exact",
    "oelm-random",
    "oelm-random-matched",
    "oelm-random-orthogonal",
    "random-nofreeze",
    "oelm-qk-ffn",
    "identity-key",
    "lora",
    "oft",
    "bitfit",
    "last-layers",
    "head-only",
]


@pytest.mark.sample(4)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_and_frozen_weights_do_not_change(method, tmp_path):
    if method in ("lora", "oft"):
        pytest.importorskip("peft")
    layers = 3 if method == "last-layers" else 2
    few_examples = {
        "data": {"fraction": 0.02},
        "train": {"max_steps": 40},
        "eval": {"every": 40},
    }  # few enough to memorise
    changes = {"method": method, "model": {"fields": {"num_hidden_layers": layers}}, **few_examples}
    run = config(tmp_path, **changes)
    model = open_task(run).build_model(run)
    oelm.apply(model, run.method, run.seed)
    before = {name: value.clone() for name, value in named_tensors(model, None).items()}
    frozen = {f"model/{name}" for name, parameter in model.named_parameters() if not parameter.requires_grad}
    result = run_here(tmp_path, **changes)
    after = named_tensors(load_run(run.folder, last=True), None)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert not changed & frozen
    trained = {f"model/{name}" for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(changed) > 0.9 * len(trained), "an unused position or word may stay"
    losses = [line.loss for line in read_metrics(run.folder) if line.kind == "train"]
    assert losses[-1] < losses[0]
    audit = read(run.folder / "audit.json")
    assert audit["method"] == method
    assert result["parameters"]["frozen"] == sum(before[name].numel() for name in frozen)


# Learning


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("task", "rate", "steps"),
    [("builtin:sentiment", 3e-3, 150), pytest.param("builtin:inference", 1e-3, 600, marks=pytest.mark.slow)],
)
def test_a_small_bert_learns_the_built_in_task(task, rate, steps, tmp_path):
    changes = {
        "task": {"name": task},
        "optimizer": {"learning_rate": rate},
        "train": {"max_steps": steps, "batch_size": 32},
        "model": {"fields": {"hidden_size": 64, "intermediate_size": 128}},
        "eval": {"every": steps, "sequences": 400},
    }
    result = run_here(tmp_path, **changes)
    assert result["best_accuracy"] > result["majority"]["accuracy"] + 0.07
    assert result["at_chance"] is False
    assert result["warnings"] == []


def test_a_run_at_chance_level_has_a_warning(tmp_path):
    result = run_here(tmp_path, optimizer={"learning_rate": 1e-9})
    assert result["at_chance"] is True
    (warning,) = result["warnings"]
    assert "within noise of always answering" in warning
    assert "a failed run, not a comparison" in warning


# Records


@pytest.mark.full
def test_the_result_has_the_metrics_of_the_best_and_the_last_epoch(tmp_path):
    changes = {
        "train": {"max_steps": None, "epochs": 2.0},
        "eval": {"every": "epoch"},
        "checkpoint": {"every": "epoch"},
    }
    result = run_here(tmp_path, **changes)
    run = config(tmp_path, **changes)
    assert result["steps"] == 2 * 125
    assert result["epochs"] == 2.0
    validations = [line for line in read_metrics(run.folder) if line.kind == "val"]
    assert [line.epoch for line in validations] == [1.0, 2.0]
    assert result["last"]["accuracy"] == result["accuracy"] == validations[-1].accuracy
    best = max(validations, key=lambda line: (line.accuracy, -line.loss))
    assert result["best"]["step"] == result["best_step"] == best.step
    assert result["best"]["accuracy"] == result["best_accuracy"] == best.accuracy
    confusion = np.array(result["last"]["confusion"])
    again = classification_metrics(confusion, result["labels"])
    assert {key: result["last"][key] for key in again} == again
    assert confusion.sum() == result["last"]["n"] == 100
    assert result["task"] == {"kind": "classification", "name": "builtin:sentiment"}
    assert result["data"]["synthetic"] is True
    splits = read(run.folder / "environment.json")["data"]["splits"]
    assert sum(splits["train"]["per_class"]) == splits["train"]["examples"] == 2000


def test_another_metric_can_choose_the_best_model(tmp_path):
    result = run_here(tmp_path, eval={"every": 5, "choose": "loss"})
    lines = [line for line in read_metrics(config(tmp_path).folder) if line.kind == "val"]
    assert result["best"]["loss"] == min(line.loss for line in lines)


def test_validation_does_not_depend_on_the_batch_size(tmp_path):
    run_here(tmp_path)
    run = config(tmp_path).folder
    small_batches, large_batches = (evaluate_run(run, batch_size=size) for size in (7, 64))
    assert small_batches["accuracy"] == large_batches["accuracy"]
    assert small_batches["confusion"] == large_batches["confusion"]
    assert small_batches["val_loss"] == pytest.approx(large_batches["val_loss"], rel=1e-5)
    assert small_batches["n"] == 400, "all examples"


def test_targets_are_accuracies(tmp_path):
    result = run_here(tmp_path, eval={"targets": [0.01, 1.5]})
    assert result["reached"]["0.01"]["step"] == 15
    assert "1.5" not in result["reached"]


def test_attention_is_measured_at_every_validation(tmp_path):
    run_here(tmp_path)
    lines = [line for line in read_metrics(config(tmp_path).folder) if line.kind == "attention"]
    assert [line.step for line in lines] == [0, 15, 30], "the first before anything was learned"
    for layer in lines[0].layers:
        assert 0 < layer.entropy_share <= 1.0001
        assert layer.entropy > 0
        assert layer.logit_std >= 0
    assert [layer.label for layer in lines[0].layers] == ["encoder 0", "encoder 1"]


# What the arms of an experiment share


def test_arms_share_their_batches_and_their_head(tmp_path):
    base, frozen = (config(tmp_path, method=name) for name in ("baseline", "oelm-freeze"))
    base_task, frozen_task = open_task(base), open_task(frozen)
    for first in (0, 160):
        left, right = base_task.batch(first, 16), frozen_task.batch(first, 16)
        assert all(torch.equal(left[name], right[name]) for name in left)
    models = [task.build_model(run) for task, run in ((base_task, base), (frozen_task, frozen))]
    oelm.apply(models[1], "oelm-freeze", 0)
    weights = [model.classifier.weight for model in models]
    assert torch.equal(*weights)


def test_no_batch_is_wider_than_the_largest(tmp_path):
    task = open_task(config(tmp_path))
    widest = max(task.batch(first, 16)["input_ids"].shape[1] for first in range(0, task.samples_per_epoch, 16))
    assert task.largest(16)["input_ids"].shape == (16, widest)
    assert task.largest(5000)["labels"].shape == (5000,), "more than there are examples"


def test_gradient_accumulation_changes_the_loss_only_by_rounding(tmp_path):
    no_dropout = {"model": {"fields": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}}}
    whole = run_here(tmp_path / "whole", **no_dropout)
    parts = run_here(tmp_path / "parts", **no_dropout, train={"micro_batch_size": 4})
    assert parts["val_loss"] == pytest.approx(whole["val_loss"], rel=1e-3)


def test_the_validation_subset_does_not_depend_on_the_order_of_the_file(tmp_path):
    judgement_tokenizer().save_pretrained(tmp_path / "reader")
    subsets = []
    for name, order in (("sorted", sorted), ("as-made", list)):
        folder = labelled_folder(tmp_path / name, ("text", "label"), order)
        changes = {
            "task": {"name": "folder"},
            "model": {"tokenizer": str(tmp_path / "reader")},
            "data": {"path": str(folder)},
            "train": {"max_steps": 2},
            "eval": {"every": 2, "sequences": 20},
        }
        result = run_here(tmp_path / f"runs-{name}", **changes)
        assert (result["last"]["n"], result["last"]["held_out"]) == (20, 100)
        assert (
            "on 20 of 100 (majority" in (config(tmp_path / f"runs-{name}", **changes).folder / "train.log").read_text()
        )
        task = open_task(config(tmp_path, **changes, seed=5, method="oelm-freeze"))
        texts = task.data.splits["validation"].texts
        subsets.append(
            (sorted(texts[row] for row in task.validation_order), result["last"]["per_class"]["good"]["support"])
        )
        larger = open_task(config(tmp_path, **changes | {"eval": {"sequences": 50}}))
        assert set(task.validation_order) < set(larger.validation_order), "a smaller subset is part of a larger one"
    assert subsets[0] == subsets[1]
    assert 4 < subsets[0][1] < 16


# Resume


@pytest.mark.full
def test_a_killed_and_resumed_run_ends_with_the_same_bits(tmp_path):
    pytest.importorskip("peft")
    for method in ("oelm-exact", "lora"):
        changes = {"method": method, "checkpoint": {"every": 10}}
        whole, cut = (tmp_path / method / name for name in ("whole", "cut"))
        run_to_end("train", write_yaml(whole / "run.yaml", fields(whole, **changes)), "-q")
        file = write_yaml(cut / "run.yaml", fields(cut, **changes))
        process = start("train", file, "-q", sabotage=Death(60))
        assert process.wait() == -9
        run = config(cut, **changes).folder
        assert list_checkpoints(run / "checkpoints"), "it died after a checkpoint"
        assert not (run / "result.json").exists()
        run_to_end("train", file, "-q")
        assert_same_run(run, config(whole, **changes).folder)


def test_a_resume_with_other_special_tokens_is_refused(tmp_path):
    """The vocabulary is the same, but the rest of the run would train on other ids."""
    with_special_tokens, without_special_tokens = judgement_tokenizer(), judgement_tokenizer()
    without_special_tokens.backend_tokenizer.post_processor = None
    with_special_tokens.save_pretrained(tmp_path / "reader")
    changes = {"model": {"tokenizer": str(tmp_path / "reader")}, "train": {"max_steps": 2}, "eval": {"every": 2}}
    run_here(tmp_path, **changes)
    (config(tmp_path, **changes).folder / "result.json").unlink()
    run_here(tmp_path, **changes)
    (config(tmp_path, **changes).folder / "result.json").unlink()
    before = open_task(config(tmp_path, **changes)).describe()
    without_special_tokens.save_pretrained(tmp_path / "reader")
    with pytest.raises(CheckpointError, match=r"builtin:sentiment or .*tokenizer have changed since"):
        run_here(tmp_path, **changes, checkpoint={"resume": "inexact"})
    after = open_task(config(tmp_path, **changes)).describe()
    changed = [name for name in before if before[name] != after[name]]
    assert changed == ["marks"], "older records lack this field and are compared by the others"


def test_the_hash_of_a_tokenizer_does_not_depend_on_its_earlier_use(tmp_path):
    unused, used = (ModelTokenizer.of(config(tmp_path)) for _ in range(2))
    used.tokenizer(["a good film"], truncation=True, max_length=3, padding="max_length")
    assert unused.sha256 == used.sha256
    used.save(tmp_path / "saved")
    loaded = ModelTokenizer.of(config(tmp_path, model={"tokenizer": str(tmp_path / "saved")}))
    assert loaded.sha256 == unused.sha256, "saving and loading does not change it"
    assert loaded.encode(["a good film"]).ids.tolist() == unused.encode(["a good film"]).ids.tolist()


# Models


@pytest.mark.parametrize("family", ["gpt2", "llama", "gpt_neox", "oelm-gpt", "oelm-gpt-rotary"])
def test_decoders_classify_at_the_last_token_that_is_not_padding(family, tmp_path):
    changes = fields(tmp_path, model={"name": f"random:{family}"})
    changes["model"]["fields"] = {}
    run = oelm.RunConfig.load(changes)
    task = open_task(run)
    model = task.build_model(run).eval()
    batch = task.batch(0, 16)
    batch.pop("labels")
    with torch.no_grad():
        together = model(**batch).logits
        for row in range(16):
            real = int(batch["attention_mask"][row].sum())
            alone = model(**{name: values[row : row + 1, :real] for name, values in batch.items()}).logits
            torch.testing.assert_close(together[row : row + 1], alone, rtol=1e-4, atol=1e-5)


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    "family", ["roberta", "distilbert", "albert", "deberta-v2", "modernbert", "gpt2", "qwen3", "t5"]
)
def test_other_families_can_be_fine_tuned(family, tmp_path):
    changes = fields(tmp_path, method="oelm-freeze", train={"max_steps": 4}, eval={"every": 4, "sequences": 20})
    changes["model"] = {"name": f"random:{family}"}
    from oelm.training.engine import train

    result = train(oelm.RunConfig.load(changes), quiet=True)
    assert result["steps"] == 4
    oelm.verify(load_run(oelm.RunConfig.load(changes).folder))


def test_the_projects_gpt_can_be_fine_tuned_from_scratch(tmp_path):
    small = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    changes = fields(tmp_path, method="oelm-freeze", data={"sequence_length": 48})
    changes["model"] = {"name": "gpt:tiny", "fields": small}
    from oelm.training.engine import train

    result = train(oelm.RunConfig.load(changes), quiet=True)
    assert result["parameters"]["frozen"] == 2 * 2 * 64 * 64


def pretrained(folder, tokenizer=True):
    """Save a pretrained encoder: a body without a head, and its tokenizer."""
    model_tokenizer = judgement_tokenizer()
    small_model("bert", vocab_size=len(model_tokenizer)).bert.save_pretrained(folder)
    if tokenizer:
        model_tokenizer.save_pretrained(folder)
    return folder


@pytest.mark.full
def test_a_loaded_model_trains_with_dropout_from_its_first_step(tmp_path):
    """transformers loads a model in evaluation mode. Measuring attention or resuming must not change the weights."""
    name = str(pretrained(tmp_path / "bert"))
    common = {"checkpoint": {"every": 10}, "train": {"max_steps": 20}}

    def run(arm, **changes):
        run_fields = fields(tmp_path / arm, **common, **changes) | {"model": {"name": name}}
        return write_yaml(tmp_path / arm / "run.yaml", run_fields), config(tmp_path / arm).folder

    whole, unmeasured, cut = run("whole"), run("unmeasured", eval={"probe": 0}), run("cut")
    for file, _ in (whole, unmeasured):
        run_to_end("train", file, "-q")
    assert final_tensors(unmeasured[1]) == final_tensors(whole[1])
    assert start("train", cut[0], "-q", sabotage=Death(60)).wait() == -9
    assert [path.name for path in list_checkpoints(cut[1] / "checkpoints")] == ["step-00000010"]
    run_to_end("train", cut[0], "-q")
    assert_same_run(cut[1], whole[1])


@pytest.mark.parametrize("classes", [("bad", "good"), ("negative", "positive"), ("one", "two", "three")])
def test_a_warning_says_that_a_head_is_kept_under_other_labels(classes, tmp_path):
    """A classifier with the same number of classes keeps its head; any other gets a new one."""
    folder = pretrained(tmp_path / "body")
    names = dict(enumerate(classes))
    classifier = small_model("bert", vocab_size=len(judgement_tokenizer()), id2label=names)
    classifier.save_pretrained(folder)
    changes = fields(tmp_path)
    changes["model"] = {"name": str(folder)}
    run = oelm.RunConfig.load(changes)
    task = open_task(run)
    warnings = [line for line in task.warnings() if "its head is kept" in line]
    expected = "bad, good are now negative, positive"
    assert [expected in line for line in warnings] == ([True] if classes[0] == "bad" else [])
    head_is_kept = torch.equal(task.build_model(run).classifier.weight, classifier.classifier.weight)
    assert head_is_kept == (len(classes) == 2)


def test_a_pretrained_body_keeps_its_weights_and_gets_a_seeded_head(tmp_path):
    folder = pretrained(tmp_path / "body")
    changes = fields(tmp_path, method="oelm-exact")
    changes["model"] = {"name": str(folder)}
    run = oelm.RunConfig.load(changes)
    task = open_task(run)
    model, again = task.build_model(run), task.build_model(run)
    assert torch.equal(model.classifier.weight, again.classifier.weight)
    other = oelm.RunConfig.load({**changes, "seed": 1})
    assert not torch.equal(model.classifier.weight, task.build_model(other).classifier.weight)
    from transformers import BertModel

    plain = BertModel.from_pretrained(folder).state_dict()
    assert all(torch.equal(model.bert.state_dict()[name], value) for name, value in plain.items())
    batch = task.batch(0, 8)
    batch.pop("labels")
    model.eval()
    with torch.no_grad():
        before = model(**batch).logits
        oelm.apply(model, "oelm-exact", 0)
        torch.testing.assert_close(model(**batch).logits, before, rtol=1e-5, atol=1e-5)


MEMORISE = {
    "data": {"fraction": 0.02},
    "train": {"max_steps": 60},
    "eval": {"every": 60},
}  # few enough rows to memorise


@pytest.mark.full
@pytest.mark.parametrize("family", ["bert", "gpt2", "oelm-gpt", "oelm-gpt-rotary"])
def test_the_export_runs_in_a_plain_pipeline(family, tmp_path):
    changes = fields(tmp_path, method="oelm-freeze", **MEMORISE)
    changes["model"] = {"name": f"random:{family}"}
    run = oelm.RunConfig.load(changes)
    oelm.train(run, quiet=True)
    run_to_end("export", run.folder, tmp_path / "plain")
    texts = open_task(run).data.splits["train"].texts[:4]
    predictions = [predict_one(run.folder, text) for text in texts]
    assert len({round(prediction["probabilities"]["positive"], 3) for prediction in predictions}) > 1, "texts differ"
    script = (
        "import sys, json; from transformers import pipeline; "
        f"classify = pipeline('text-classification', model={str(tmp_path / 'plain')!r}, device='cpu'); "
        f"answers = [classify(text)[0] for text in {texts!r}]; "
        "assert 'oelm' not in sys.modules; print(json.dumps(answers))"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    for prediction, answer in zip(predictions, json.loads(result.stdout.splitlines()[-1]), strict=True):
        assert answer["label"] == prediction["label"]
        assert answer["score"] == pytest.approx(prediction["probabilities"][prediction["label"]], abs=1e-4)


def test_predict_refuses_a_run_that_has_not_started(tmp_path):
    run = config(tmp_path)
    run.folder.mkdir(parents=True)
    RecordedConfig(id=run.id, config=run).write(run.folder / "config.json")
    with pytest.raises(oelm.OelmError, match="no model yet"):
        predict_one(run.folder, "fine")


@pytest.mark.sample(1)
@pytest.mark.parametrize("family", ["bert", "gpt2", "qwen2", "gptj"])
def test_predict_encodes_a_pair_as_training_does(family, tmp_path):
    changes = fields(tmp_path, task={"name": "builtin:inference"}, **MEMORISE)
    changes["model"] = {"name": f"random:{family}"}
    run = oelm.RunConfig.load(changes)
    oelm.train(run, quiet=True)
    task, model = open_task(run), load_run(run.folder)
    split = task.data.splits["validation"]
    for row, example in enumerate(task.validation_order[:4]):
        batch = task.validation(row, 1, 1)
        batch.pop("labels")
        with torch.no_grad():
            expected = torch.softmax(model(**batch).logits[0], -1).tolist()
        probabilities = predict_one(run.folder, split.texts[example], split.pairs[example])["probabilities"]
        assert list(probabilities.values()) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(oelm.OelmError, match="pairs of texts: give two"):
        predict_one(run.folder, "one text")
    with pytest.raises(oelm.OelmError, match="the text is empty"):
        predict_one(run.folder, " ", "x")


def own_files(folder):
    """Write files of a user with a test split, and return the fields of a run on them."""
    from oelm.data.synthetic.judgements import judgement_tokenizer

    (folder / "data").mkdir()
    for split, size in (("train", 64), ("validation", 24), ("test", 50)):
        rows = [f"{split} film {'good' if i % 2 else 'bad'} {'so ' * (i % 9)}{i},{i % 2}" for i in range(size)]
        (folder / f"data/{split}.csv").write_text("\n".join(["text,label", *rows, ""]))
    judgement_tokenizer().save_pretrained(folder / "reader")
    model = {"tokenizer": str(folder / "reader")}
    return {"task": {"name": "folder"}, "data": {"path": str(folder / "data")}, "model": model}


def test_other_splits_are_evaluated_completely_with_the_best_model(tmp_path):
    changes = {**own_files(tmp_path), "eval": {"sequences": 10, "every": 10}}
    result = run_here(tmp_path, **changes)
    test = result["evaluations"]["test"]
    assert test["n"] == 50, "all of it, although validation uses 10"
    assert test["majority"] == {"label": "0", "accuracy": 0.5}
    assert test["step"] == result["best"]["step"]
    assert result["best"]["n"] == 10
    again = evaluate_run(config(tmp_path, **changes).folder)
    assert again["n"] == 24
    assert again["evaluations"]["test"]["confusion"] == test["confusion"]


def test_other_splits_are_not_evaluated_with_a_stale_best_model(tmp_path, monkeypatch):
    changes = {**own_files(tmp_path), "eval": {"every": 10, "choose": "loss"}, "checkpoint": {"every": 12}}
    with monkeypatch.context() as patched:
        patched.setattr(engine, "_log", fails_at(14, engine._log))
        with pytest.raises(KeyboardInterrupt):
            run_here(tmp_path, **{**changes, "log": {"every": 1}})
    changes["checkpoint"] = {"every": 12, "best": False}
    result = run_here(tmp_path, **changes)
    assert (result["best"]["step"], result["evaluations"]["test"]["step"]) == (30, 30)
    (note,) = result["notes"]
    assert all(part in note for part in ("best/", "step 10", "step 30"))
    with pytest.warns(UserWarning, match="the last checkpoint's model"):
        again = evaluate_run(config(tmp_path, **changes).folder)
    assert again["evaluations"]["test"]["confusion"] == result["evaluations"]["test"]["confusion"]


def fails_at(step, function):
    def failing(run, *arguments):
        if run.state.step == step:
            raise KeyboardInterrupt
        return function(run, *arguments)

    return failing


@pytest.mark.full
def test_a_run_without_a_best_model_can_be_evaluated_queried_and_exported(tmp_path):
    changes = {**own_files(tmp_path), "checkpoint": {"best": False}}
    result = run_here(tmp_path, **changes)
    assert result["evaluations"]["test"]["step"] == result["steps"]
    run = config(tmp_path, **changes).folder
    accuracy = result["evaluations"]["test"]["accuracy"]
    assert read_state(run).split_accuracy == {"test": accuracy}
    assert f"test at step {result['steps']}: accuracy {accuracy:.4f} on 50" in (run / "train.log").read_text()
    assert predict_one(run, "film good")["label"] in ("0", "1")
    run_to_end("export", run, tmp_path / "plain")
    assert (tmp_path / "plain/tokenizer.json").is_file()


# The command line


def test_runs_on_files_of_ones_own_are_named_after_their_folder(tmp_path):
    """So runs on two folders do not end up in one place."""
    tokenizer = own_files(tmp_path)["model"]["tokenizer"]
    (tmp_path / "data").rename(tmp_path / "my reviews")
    command = ["finetune", "folder", "--data", tmp_path / "my reviews", "--model", "random:bert"]
    settings = [f"model.tokenizer={tokenizer}", "train.max_steps=2", "eval.every=2", "train.device=cpu"]
    run_to_end(*command, "--output", tmp_path / "runs", *settings, "--quiet")
    assert (tmp_path / "runs/my-reviews/baseline/seed-0/result.json").is_file()


def test_the_commands_train_and_predict(tmp_path):
    small = [f"model.fields={json.dumps({'hidden_size': 32, 'num_hidden_layers': 2, 'num_attention_heads': 2})}"]
    options = ["train.max_steps=6", "eval.sequences=50", "eval.every=6", "train.device=cpu", *small]
    command = ["finetune", "builtin:inference", "--model", "random:bert", "--output", tmp_path, "method=oelm-freeze"]
    process = run_to_end(*command, "--recipe", "reference", *options, "--quiet")
    assert set(json.loads(process.output.splitlines()[-1])) == {
        "val_loss",
        "accuracy",
        "best_accuracy",
        "steps",
        "tokens",
    }
    run = tmp_path / "builtin-inference/oelm-freeze/seed-0"
    assert read(run / "config.json")["optimizer"]["learning_rate"] == 1e-4
    answer = json.loads(run_to_end("predict", run, "tom has a ball", "tom has nothing").output)
    assert answer["label"] in ("entailment", "neutral", "contradiction")
    assert sum(answer["probabilities"].values()) == pytest.approx(1.0)
    again = json.loads(run_to_end("eval", run).output)
    assert again["examples"] == 400, "all examples"
    generate = start("generate", run)
    assert generate.wait() == 2
    assert "use `oelm predict`" in generate.output


@pytest.mark.parametrize(
    ("arguments", "rate"),
    [
        (["--method", "oelm-freeze"], 1e-4),
        (["method=oelm-freeze"], 1e-4),
        (["method=baseline"], 2e-5),
        (["method=oelm-freeze", "optimizer.learning_rate=3e-3"], 3e-3),
        (["method=oelm-freeze", "optimizer={learning_rate: 3.0e-3}"], 3e-3),
    ],
)
def test_the_learning_rate_of_the_reference_recipe_depends_on_the_method(arguments, rate, monkeypatch):
    chosen = []

    def note_rate(config, quiet):
        chosen.append(config.optimizer.learning_rate)

    monkeypatch.setattr(commands, "train_and_print", note_rate)
    command = ["finetune", "sst2", "--recipe", "reference", "--out", "there", *arguments]
    assert CliRunner().invoke(app, command).exit_code == 0
    assert chosen == [rate]


def test_the_command_takes_a_method_file_with_changes(tmp_path):
    (tmp_path / "method.yaml").write_text("preset: oelm-freeze\nlayers: last:1\n")
    options = ["train.max_steps=2", "eval.sequences=8", "train.device=cpu", "method.k.scale=2", "--quiet"]
    command = ["finetune", "builtin:sentiment", "--model", "random:bert", "--output", tmp_path]
    run_to_end(*command, "--method", tmp_path / "method.yaml", *options)
    (config,) = tmp_path.glob("builtin-sentiment/custom-*/seed-0/config.json")
    method = read(config)["method"]
    assert (method["layers"], method["k"]["scale"], method["q"]["frozen"]) == ("last:1", 2, True)
