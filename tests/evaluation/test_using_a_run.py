"""Using a trained run: evaluating it again, generating text, exporting it; in Python and on the command line."""

import json
import math
import os
import re
import shutil
import signal

import pytest
import torch
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import oelm
from oelm.cli.app import app
from oelm.data.tokenizer import load_model_tokenizer
from oelm.errors import CheckpointError, ConfigError, ModelError
from oelm.evaluation.generate import Sampling, generate_text
from oelm.evaluation.load import find_model, load_run
from oelm.evaluation.use import evaluate_run
from oelm.models.card import CARD
from oelm.models.small import small_model
from oelm.runs.environment import config_of, is_run
from oelm.runs.schema import RecordedConfig
from tests.support.training import config, run_here, run_to_end, start, tiny, token_folder, weights, write_yaml


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Return a run whose last model is not its best, because its learning rate is far too high at the end."""
    folder = tmp_path_factory.mktemp("trained")
    changes = {
        "method": "oelm-core",
        "train": {"max_steps": 30},
        "optimizer": {"learning_rate": 2.0, "warmup_steps": 2000, "clip": 0.0},
        "eval": {"every": 3, "sequences": None},
    }
    result = run_here(folder, **changes)
    assert result["best_step"] < 30
    return config(folder, **changes).folder, result


def command(*arguments: object):
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.mark.parametrize(("last", "key"), [(False, "best_val_loss"), (True, "val_loss")])
def test_evaluation_gives_the_metrics_of_training(last, key, trained):
    run, result = trained
    evaluation = evaluate_run(run, batch_size=7, last=last)
    assert evaluation["val_loss"] == pytest.approx(result[key], abs=1e-5)
    assert evaluation["perplexity"] == math.exp(evaluation["val_loss"])
    assert evaluation["synthetic"] is True
    folder_and_step = ("checkpoints/step-00000030", 30) if last else ("best", result["best_step"])
    assert (evaluation["model"], evaluation["step"]) == folder_and_step
    if last:
        assert evaluation["bits_per_byte"] == pytest.approx(result["bits_per_byte"], abs=1e-5)


def test_the_last_model_has_the_weights_of_the_last_checkpoint(trained):
    run, _ = trained
    last, best = load_run(run, last=True), load_run(run)
    stored = weights(run)
    assert all(torch.equal(p, stored[name]) for name, p in last.named_parameters())
    assert not torch.equal(best.lm_head.weight, last.lm_head.weight)
    assert not last.training
    assert oelm.verify(last).exact == oelm.verify(best).exact == 4


def test_a_runs_folder_is_recognised_and_has_its_config(trained, tmp_path):
    run, result = trained
    assert is_run(run)
    assert not is_run(run / "best")
    assert not is_run(tmp_path)
    assert config_of(run).id == result["id"]


def generated(run, prompt, *sampling, seed=0):
    return generate_text(run, prompt, Sampling(*sampling, seed=seed)).text


def test_generated_text_depends_only_on_the_seed_and_greedy_text_not_even_on_that(trained):
    run, _ = trained
    text = generated(run, "Once upon a time", 20, 1.0, 50, seed=1)
    assert text.startswith("Once upon a time")
    assert text == generated(run, "Once upon a time", 20, 1.0, 50, seed=1)
    assert text != generated(run, "Once upon a time", 20, 1.0, 50, seed=2)
    greedy = generated(run, "Once upon a time", 20, 0.0, 0, seed=1)
    assert greedy == generated(run, "Once upon a time", 20, 0.0, 0, seed=2)


def test_a_prompt_longer_than_the_positions_is_cut_at_its_start_and_says_so(trained):
    run, _ = trained
    prompt = "Once upon a time " * 20 + "the end"
    result = command("generate", run, "--prompt", prompt, "--tokens", 5, "--temperature", 0)
    assert result.exit_code == 0, result.output
    assert "the end" in result.stdout
    assert len(result.stdout) < len(prompt)
    continuation = generate_text(run, prompt, Sampling(5, 0.0, 0))
    assert prompt.startswith(continuation.cut.strip())
    count = continuation.cut_tokens
    assert f"the model has 32 positions, so the first {count} tokens of the prompt were cut" in result.stderr
    # Together they fill the positions: the last new token is never read.
    assert len(tokenize(run, prompt)) - count + 5 - 1 == 32
    assert command("generate", run, "--tokens", 5).stderr == "", "nothing was cut"


def tokenize(run, text):
    return load_model_tokenizer(run / "best")(text).input_ids


@pytest.mark.parametrize("prompt", ["Once upon a time", "Once upon a time " * 20])
def test_the_default_number_of_tokens_fits_the_positions(prompt, trained):
    result = command("generate", trained[0], "--prompt", prompt, "--temperature", 0)
    assert result.exit_code == 0, result.output
    assert "Once upon a time" in result.stdout
    assert not result.stdout.endswith("time\n")


def test_the_advice_is_the_most_tokens_that_the_model_can_add(trained):
    run, _ = trained
    with pytest.raises(ConfigError, match=r"--tokens 33: .*32 positions") as refused:
        generate_text(run, "Once upon a time", Sampling(33, 0.0, 0))
    room = int(re.search(r"at most (\d+) after this prompt", str(refused.value))[1])
    assert generate_text(run, "Once upon a time", Sampling(room, 0.0, 0)).cut_tokens == 0
    assert generate_text(run, "Once upon a time", Sampling(room + 1, 0.0, 0)).cut_tokens == 1
    model, ids = load_run(run), torch.tensor([tokenize(run, "Once upon a time")])
    never = {"eos_token_id": None, "do_sample": False, "pad_token_id": 0}
    assert model.generate(ids, max_new_tokens=room, **never).shape[1] == 33
    with pytest.raises(ValueError, match="positions"):
        model.generate(ids, max_new_tokens=room + 1, **never)


def test_an_empty_prompt_is_refused(trained):
    with pytest.raises(ConfigError, match="the prompt is empty"):
        generate_text(trained[0], "", Sampling(5, 0.0, 0))


def test_a_run_generates_where_its_data_are_not(trained, tmp_path):
    """Copied, or used from another folder than the one that its config's paths are relative to."""
    copied = tmp_path / "copied"
    shutil.copytree(trained[0], copied)
    content = json.loads((copied / "config.json").read_text())
    content["data"]["path"] = "data/gone"
    (copied / "config.json").write_text(json.dumps(content))
    assert generated(copied, "Once", 9, 0.0, 0) == generated(trained[0], "Once", 9, 0.0, 0)


def test_any_folder_with_a_language_model_generates(trained, tmp_path):
    """The best model of a run, one that was exported, and one that was saved after apply."""
    run, _ = trained
    assert command("export", run, tmp_path / "plain").exit_code == 0
    texts = [command("generate", folder, "--temperature", 0, "--tokens", 9) for folder in (run, run / "best")]
    texts.append(command("generate", tmp_path / "plain", "--temperature", 0, "--tokens", 9))
    assert [text.exit_code for text in texts] == [0, 0, 0], [text.output for text in texts]
    assert len({text.stdout for text in texts}) == 1
    (tmp_path / "plain" / "tokenizer.json").unlink()
    assert "no tokenizer here" in command("generate", tmp_path / "plain").stderr
    small_model("bert").save_pretrained(tmp_path / "bert")
    assert "does not continue a prompt" in command("generate", tmp_path / "bert").stderr


def test_a_temperature_or_a_seed_out_of_range_is_refused(trained):
    result = command("generate", trained[0], "--temperature", "1e-40")
    assert result.exit_code == 2
    assert "--temperature 1e-40" in result.output
    assert "0 always takes the most likely token" in result.output
    assert command("generate", trained[0], "--tokens", 3, "--temperature", "1e-30").exit_code == 0
    for seed in (-1, 2**64):
        assert command("generate", trained[0], "--seed", seed).exit_code == 2
    assert command("generate", trained[0], "--tokens", 3, "--seed", 2**64 - 1).exit_code == 0


def test_saved_models_stop_at_the_end_of_text_token(trained, tmp_path):
    """The token comes from the data, and pipelines read it from the model's folder."""
    run, _ = trained
    end = json.loads((token_folder() / "data.json").read_text())["eos_id"]
    assert command("export", run, tmp_path / "plain").exit_code == 0
    for folder in (run / "best", tmp_path / "plain"):
        for file in ("config.json", "generation_config.json"):
            assert json.loads((folder / file).read_text())["eos_token_id"] == end
    model = load_run(run, last=True)
    with torch.no_grad():
        model.lm_head.weight[end] = 100 * model.transformer.ln_f.bias  # the end-of-text token is always the most likely
        model.transformer.ln_f.weight.zero_()
    assert model.generate(torch.tensor([[5, 6]]), max_new_tokens=9).shape[1] == 3
    changed = config(tmp_path, model={"fields": {"eos_token_id": 7}})
    assert find_model(str(write_yaml(tmp_path / "changed.json", changed.to_dict())))[0].config.eos_token_id == 7


def test_folders_without_a_trained_run_are_refused(trained, tmp_path):
    for folder in (tmp_path, trained[0] / "best"):
        with pytest.raises(ConfigError, match="not a run's folder"):
            evaluate_run(folder)
    untrained = config(tmp_path)
    untrained.folder.mkdir(parents=True)
    RecordedConfig(id=untrained.id, config=untrained).write(untrained.folder / "config.json")
    with pytest.raises(CheckpointError, match=r"neither .*best model nor a checkpoint"):
        load_run(untrained.folder)


def test_the_last_checkpoint_of_a_cleaned_run_is_refused(trained, tmp_path):
    cleaned = tmp_path / "run"
    shutil.copytree(trained[0], cleaned, ignore=shutil.ignore_patterns("checkpoints"))
    result = command("eval", cleaned, "--last")
    assert result.exit_code == 2
    assert f"{cleaned}: " in result.output
    assert "--last" in result.output
    assert command("eval", cleaned).exit_code == 0


def test_lm_eval_loads_a_runs_best_folder(trained):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    run, _ = trained
    harness = HFLM(pretrained=str(run / "best"), device="cpu", batch_size=2, dtype="float32")
    context, continuation = "Once upon a time there", " was a little"
    ((log_likelihood, _),) = harness.loglikelihood(
        [Instance("loglikelihood", {}, (context, continuation), 0)], disable_tqdm=True
    )
    start, ids = (harness.tokenizer(text, return_tensors="pt").input_ids for text in (context, context + continuation))
    with torch.no_grad():
        log_probabilities = load_run(run)(ids).logits.log_softmax(-1)
    token_scores = log_probabilities[0, :-1].gather(1, ids[0, 1:, None])[start.shape[1] - 1 :]
    assert log_likelihood == pytest.approx(float(token_scores.sum()), abs=1e-3)


# The command line


def kill_before_the_weights():
    """Kill the process when the weights are to be written, after the config: half a folder must not remain."""
    import transformers.modeling_utils as saving

    saving.safe_save_file = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_export_leaves_no_folder(trained, tmp_path):
    process = start("export", trained[0], tmp_path / "plain", sabotage=kill_before_the_weights)
    assert process.wait() == -signal.SIGKILL
    assert not (tmp_path / "plain").exists()
    run_to_end("export", trained[0], tmp_path / "plain")
    complete = {"config.json", "model.safetensors", "tokenizer.json"}
    assert complete <= {file.name for file in (tmp_path / "plain").iterdir()}


def test_a_folder_without_weights_is_refused(trained, tmp_path):
    oelm.export(load_run(trained[0]), tmp_path)
    assert find_model(str(tmp_path))[0].config.model_type == "gpt2"
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"model\.safetensors.*model\.from_scratch=true"):
        find_model(str(tmp_path))


def test_the_eval_command_prints_the_losses_of_training(trained):
    run, result = trained
    completed = command("eval", run, "--batch-size", 5)
    assert completed.exit_code == 0, completed.output
    assert json.loads(completed.stdout)["val_loss"] == pytest.approx(result["best_val_loss"], abs=1e-5)
    last = command("eval", run, "--last")
    assert json.loads(last.stdout)["val_loss"] == pytest.approx(result["val_loss"], abs=1e-5)


def test_the_generate_command_prints_the_text_of_its_seed(trained):
    run, _ = trained
    options = ("--prompt", "Once upon a time", "--tokens", 10, "--seed", 4)
    result = command("generate", run, *options)
    assert result.exit_code == 0, result.output
    assert result.stdout == generated(run, "Once upon a time", 10, 0.8, 50, seed=4) + "\n"
    assert command("generate", run, *options).stdout == result.stdout


def test_the_export_command_writes_the_best_model_or_the_last_checkpoint(trained, tmp_path):
    run, result = trained
    completed = command("export", run, tmp_path / "plain")
    assert completed.exit_code == 0, completed.output
    assert str(tmp_path / "plain") in completed.stdout
    assert f"best model, of step {result['best_step']}" in completed.stdout
    plain = AutoModelForCausalLM.from_pretrained(tmp_path / "plain").eval()
    assert plain.config.model_type == "gpt2"
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(plain(ids).logits, load_run(run)(ids).logits, atol=1e-4, rtol=1e-4)
    again = command("export", run, tmp_path / "plain")
    assert again.exit_code == 2
    assert "not empty" in again.stderr
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("best"))
    completed = command("export", tmp_path / "run", tmp_path / "last")
    assert "last checkpoint's model, of step 30" in completed.stdout


def test_an_exported_runs_card_has_the_figures_of_the_exported_model(trained, tmp_path):
    run, result = trained
    assert command("export", run, tmp_path / "best").exit_code == 0
    card = ModelCard.load(tmp_path / "best" / CARD)
    figures = {figure.metric_type: figure.metric_value for figure in card.data.eval_results}
    assert figures == {name: result["best"][name] for name in ("loss", "perplexity", "bits_per_byte")}
    assert f"| step of this model | {result['best_step']} |" in card.text
    assert "the method `oelm-core` (seed 0)" in card.text
    assert "base_model" not in card.data.to_dict(), "it was trained from scratch"
    shutil.copytree(run, tmp_path / "run", ignore=shutil.ignore_patterns("best", "result.json"))
    assert command("export", tmp_path / "run", tmp_path / "unfinished").exit_code == 0
    card = ModelCard.load(tmp_path / "unfinished" / CARD)
    assert card.data.eval_results is None
    assert "| step of this model | 30 |" in card.text
    assert "it is unfinished" in card.text


def test_the_train_command_takes_overrides_and_prints_the_result(tmp_path):
    file = write_yaml(tmp_path / "run.yaml", tiny(tmp_path / "runs"))
    result = command("train", file, "method=oelm-freeze", "train.max_steps=3", "--quiet")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["steps"] == 3
    assert result.stderr == ""
    assert os.listdir(tmp_path / "runs/run") == ["oelm-freeze"]


@pytest.mark.parametrize("name", ["eval", "generate", "export"])
def test_a_folder_that_is_not_a_run_is_refused_in_one_line(name, tmp_path):
    out = (tmp_path / "out",) if name == "export" else ()
    result = command(name, tmp_path, *out)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert len(result.stderr.splitlines()) == 1
