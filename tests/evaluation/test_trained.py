"""What can be done with a trained run: validate it again, let it write, export it; through the command line too."""

import json
import math
import os
import shutil
import signal

import pytest
import torch
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import oelm
from oelm.cli.app import app
from oelm.errors import CheckpointError, ConfigError, ModelError
from oelm.evaluation.evaluate import evaluate_run
from oelm.evaluation.generate import generate_text
from oelm.evaluation.load import config_of, find_model, is_run, load_run
from tests.support.training import config, finished, run_here, start, tiny, token_folder, weights, written


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run whose last model is not its best: its learning rate is far too high at the end."""
    place = tmp_path_factory.mktemp("trained")
    changes = {
        "method": "oelm-core",
        "train": {"max_steps": 30},
        "optimizer": {"learning_rate": 2.0, "warmup_steps": 2000, "clip": 0.0},
        "eval": {"every": 3, "sequences": None},
    }
    result = run_here(place, **changes)
    assert result["best_step"] < 30
    return config(place, **changes).folder, result


def command(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(("last", "key"), [(False, "best_val_loss"), (True, "val_loss")])
def test_evaluation_gives_what_training_measured(last, key, trained):
    run, result = trained
    found = evaluate_run(run, batch_size=7, last=last)
    assert found["val_loss"] == pytest.approx(result[key], abs=1e-5)
    assert found["perplexity"] == math.exp(found["val_loss"])
    assert found["synthetic"] is True
    which = ("checkpoints/step-00000030", 30) if last else ("best", result["best_step"])
    assert (found["model"], found["step"]) == which
    if last:
        assert found["bits_per_byte"] == pytest.approx(result["bits_per_byte"], abs=1e-5)


def test_the_last_model_is_the_last_checkpoints(trained):
    run, _ = trained
    last, best = load_run(run, last=True), load_run(run)
    stored = weights(run)
    assert all(torch.equal(p, stored[name]) for name, p in last.named_parameters())
    assert not torch.equal(best.lm_head.weight, last.lm_head.weight)
    assert not last.training
    assert oelm.verify(last).exact == oelm.verify(best).exact == 4


def test_a_run_knows_its_config(trained, tmp_path):
    run, result = trained
    assert is_run(run)
    assert not is_run(run / "best")
    assert not is_run(tmp_path)
    assert config_of(run).id == result["id"]


def test_text_is_a_function_of_the_seed(trained):
    run, _ = trained
    one = generate_text(run, "Once upon a time", 20, 1.0, 50, seed=1)
    assert one.startswith("Once upon a time")
    assert one == generate_text(run, "Once upon a time", 20, 1.0, 50, seed=1)
    assert one != generate_text(run, "Once upon a time", 20, 1.0, 50, seed=2)
    greedy = generate_text(run, "Once upon a time", 20, 0.0, 0, seed=1)
    assert greedy == generate_text(run, "Once upon a time", 20, 0.0, 0, seed=2)


def test_a_prompt_longer_than_the_positions_keeps_its_end(trained):
    run, _ = trained
    prompt = "Once upon a time " * 20 + "the end"
    text = generate_text(run, prompt, 5, 0.0, 0, seed=0)
    assert "the end" in text
    assert len(text) < len(prompt)


@pytest.mark.parametrize("prompt", ["Once upon a time", "Once upon a time " * 20])
def test_unless_told_otherwise_there_are_as_many_tokens_as_fit(prompt, trained):
    done = command("generate", trained[0], "--prompt", prompt, "--temperature", 0)
    assert done.exit_code == 0, done.output
    assert "Once upon a time" in done.stdout
    assert not done.stdout.endswith("time\n")


@pytest.mark.parametrize(
    ("prompt", "tokens", "says"),
    [("", 5, "the prompt is empty"), ("Once", 32, "--tokens 32: the model has 32 positions; ask for 31")],
)
def test_text_that_cannot_be(prompt, tokens, says, trained):
    with pytest.raises(ConfigError, match=says):
        generate_text(trained[0], prompt, tokens, 0.0, 0, seed=0)


def test_a_temperature_or_a_seed_that_cannot_be_is_one_clear_line(trained):
    done = command("generate", trained[0], "--temperature", "1e-40")
    assert done.exit_code == 2
    assert "too low to sample with; 0 always takes the most likely token" in done.output
    assert command("generate", trained[0], "--tokens", 3, "--temperature", "1e-30").exit_code == 0
    for seed in (-1, 2**64):
        assert command("generate", trained[0], "--seed", seed).exit_code == 2
    assert command("generate", trained[0], "--tokens", 3, "--seed", 2**64 - 1).exit_code == 0


def test_what_a_run_leaves_stops_where_a_text_ends(trained, tmp_path):
    """The data says which token ends a text: pipelines learn it from the model's folder."""
    run, _ = trained
    end = json.loads((token_folder() / "data.json").read_text())["eos_id"]
    assert command("export", run, tmp_path / "plain").exit_code == 0
    for folder in (run / "best", tmp_path / "plain"):
        for file in ("config.json", "generation_config.json"):
            assert json.loads((folder / file).read_text())["eos_token_id"] == end
    model = load_run(run, last=True)
    with torch.no_grad():
        model.lm_head.weight[end] = 100 * model.transformer.ln_f.bias  # every text is over at once
        model.transformer.ln_f.weight.zero_()
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=9).shape[1] == 3
    own = config(tmp_path, model={"fields": {"eos_token_id": 7}})
    assert find_model(str(written(tmp_path / "own.json", own.to_dict())))[0].config.eos_token_id == 7


def test_folders_that_are_no_runs(trained, tmp_path):
    for folder in (tmp_path, trained[0] / "best"):
        with pytest.raises(ConfigError, match="not a run's folder"):
            evaluate_run(folder)
    untrained = config(tmp_path)
    untrained.folder.mkdir(parents=True)
    (untrained.folder / "config.json").write_text(untrained.to_json())
    with pytest.raises(CheckpointError, match="holds neither its best model nor a checkpoint"):
        load_run(untrained.folder)


def test_the_last_checkpoint_of_a_run_that_was_cleaned(trained, tmp_path):
    cleaned = tmp_path / "run"
    shutil.copytree(trained[0], cleaned, ignore=shutil.ignore_patterns("checkpoints"))
    done = command("eval", cleaned, "--last")
    assert done.exit_code == 2
    assert "run: has no checkpoint (oelm clean removes those of finished runs); leave out --last to use" in done.output
    assert command("eval", cleaned).exit_code == 0


def test_the_evaluation_harness_reads_a_runs_best_folder(trained):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    run, _ = trained
    harness = HFLM(pretrained=str(run / "best"), device="cpu", batch_size=2, dtype="float32")
    context, rest = "Once upon a time there", " was a little"
    ((found, _),) = harness.loglikelihood([Instance("loglikelihood", {}, (context, rest), 0)], disable_tqdm=True)
    start, ids = (harness.tokenizer(text, return_tensors="pt").input_ids for text in (context, context + rest))
    with torch.no_grad():
        scores = load_run(run)(ids).logits.log_softmax(-1)
    said = scores[0, :-1].gather(1, ids[0, 1:, None])[start.shape[1] - 1 :]
    assert found == pytest.approx(float(said.sum()), abs=1e-3)


# The command line


def killed_before_the_weights():
    """The config is written first: a kill between the two is the worst moment for an export."""
    import transformers.modeling_utils as saving

    saving.safe_save_file = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)


def test_an_export_that_is_killed_leaves_no_model(trained, tmp_path):
    cut = start("export", trained[0], tmp_path / "plain", sabotage=killed_before_the_weights)
    assert cut.wait() == -signal.SIGKILL
    assert not (tmp_path / "plain").exists()
    finished("export", trained[0], tmp_path / "plain")
    whole = {"config.json", "model.safetensors", "tokenizer.json"}
    assert whole <= {file.name for file in (tmp_path / "plain").iterdir()}


def test_a_folder_without_weights_is_no_random_model(trained, tmp_path):
    oelm.export(load_run(trained[0]), tmp_path)
    assert find_model(str(tmp_path))[0].config.model_type == "gpt2"
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights \(model.safetensors\).*model.from_scratch=true"):
        find_model(str(tmp_path))


def test_eval(trained):
    run, result = trained
    done = command("eval", run, "--batch-size", 5)
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["val_loss"] == pytest.approx(result["best_val_loss"], abs=1e-5)
    last = command("eval", run, "--last")
    assert json.loads(last.stdout)["val_loss"] == pytest.approx(result["val_loss"], abs=1e-5)


def test_generate(trained):
    run, _ = trained
    options = ("--prompt", "Once upon a time", "--tokens", 10, "--seed", 4)
    done = command("generate", run, *options)
    assert done.exit_code == 0, done.output
    assert done.stdout == generate_text(run, "Once upon a time", 10, 0.8, 50, 4) + "\n"
    assert command("generate", run, *options).stdout == done.stdout


def test_export_of_a_run(trained, tmp_path):
    run, result = trained
    done = command("export", run, tmp_path / "plain")
    assert done.exit_code == 0, done.output
    assert done.stdout == f"wrote {tmp_path / 'plain'}: the best model, of step {result['best_step']}\n"
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert plain.config.model_type == "gpt2"
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, load_run(run)(ids).logits, atol=1e-4, rtol=1e-4)
    again = command("export", run, tmp_path / "plain")
    assert again.exit_code == 2
    assert "not empty" in again.stderr
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("best"))
    done = command("export", tmp_path / "run", tmp_path / "last")
    assert done.stdout == f"wrote {tmp_path / 'last'}: the last checkpoint's model, of step 30\n"


def test_train_through_the_command_line(tmp_path):
    file = written(tmp_path / "run.yaml", tiny(tmp_path / "runs"))
    done = command("train", file, "method=oelm-freeze", "train.max_steps=3", "--quiet")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["steps"] == 3
    assert done.stderr == ""
    assert os.listdir(tmp_path / "runs/run") == ["oelm-freeze"]


@pytest.mark.parametrize("name", ["eval", "generate", "export"])
def test_a_folder_that_is_no_run_is_one_clear_line(name, tmp_path):
    more = (tmp_path / "out",) if name == "export" else ()
    done = command(name, tmp_path, *more)
    assert done.exit_code == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1
