"""Invalid fine-tuning runs are refused before they start, with a message that message what to do."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import oelm
from oelm.cli.app import app
from oelm.config import ModelConfig
from oelm.data.synthetic.judgements import judgement_tokenizer
from oelm.errors import ConfigError
from oelm.models.run_model import build_language_model
from oelm.models.small import small_model
from oelm.training.tasks.open import open_task
from tests.support.finetuning import config, fields, run_here
from tests.support.training import token_folder
from tests.training.tasks.test_finetune import pretrained


def opened(tmp_path, **changes):
    run = oelm.RunConfig.load({**fields(tmp_path), **changes})
    return open_task(run).build_model(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "sst3"}, "sst3"),
        ({"task": {"name": "sst2", "texts": "x"}}, "task.texts: unknown key. Did you mean 'text'"),
        ({"train": {"max_steps": 5, "epochs": 1}}, "train.max_steps and train.epochs both give the run's length"),
        ({"task": {"name": "sst2", "source": "a", "target": "b"}}, "set form to 'text'"),
        ({"task": {"name": "folder", "form": "text", "source": "a"}}, "name both columns"),
        ({"task": {"name": "language", "form": "text"}}, "form 'text' belongs to a task with examples"),
        ({"task": {"name": "sst2", "form": "text"}, "eval": {"targets": [0.5]}}, "a text-to-text run has neither"),
        ({"task": "language", "eval": {"choose": "accuracy"}}, "the task 'language' can only use 'loss'"),
    ],
)
def test_an_invalid_config_is_refused(changes, message, tmp_path):
    with pytest.raises(oelm.OelmError) as error:
        opened(tmp_path, **changes)
    assert message in str(error.value)


def test_a_fresh_model_on_real_data_needs_a_tokenizer(tmp_path):
    (tmp_path / "data").mkdir()
    for split in ("train", "dev"):
        rows = "".join(f"text {split} {i}\t{i % 2}\n" for i in range(20))
        (tmp_path / f"data/{split}.tsv").write_text(f"sentence\tlabel\n{rows}")
    with pytest.raises(ConfigError, match=r"model\.tokenizer: random:bert brings no tokenizer; .* --train-bpe` wrote"):
        opened(tmp_path, task="sst2", data={"path": str(tmp_path / "data")})
    own = {"name": "random:bert", "tokenizer": str(token_folder() / "tokenizer")}
    assert opened(tmp_path, task="sst2", data={"path": str(tmp_path / "data")}, model=own).config.vocab_size == 400


def test_the_tokenizer_of_another_model_is_refused(tmp_path):
    reader = judgement_tokenizer()
    small_model("bert", vocab_size=len(reader) - 5).bert.save_pretrained(tmp_path / "less")
    small_model("bert", vocab_size=len(reader) + 2000).bert.save_pretrained(tmp_path / "more")
    small_model("bert", vocab_size=len(reader), pad_token_id=7).bert.save_pretrained(tmp_path / "other")
    reader.save_pretrained(tmp_path / "reader")
    named = {"tokenizer": str(tmp_path / "reader")}
    for folder, message in (("less", "the tokenizer's has"), ("more", "not its tokenizer"), ("other", "pad token is")):
        with pytest.raises(ConfigError, match=message):
            opened(tmp_path, model={"name": str(tmp_path / folder), **named})


def test_an_encoder_configured_as_a_decoder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="random:bert-cross: an encoder run as a decoder"):
        opened(tmp_path, model={"name": "random:bert-cross"})


def test_a_tokenizer_whose_padding_is_beyond_the_positions_is_refused(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(90)} | {"[END]": 90}
    reader = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0")), eos_token="[END]")
    reader.save_pretrained(tmp_path / "reader")
    with pytest.raises(ConfigError, match="counts positions from after its padding token"):
        opened(tmp_path, model={"name": "random:roberta", "tokenizer": str(tmp_path / "reader")})


def test_the_folder_of_a_run_is_refused_as_a_model(tmp_path):
    run_here(tmp_path)
    with pytest.raises(ConfigError, match="oelm export RUN OUT"):
        opened(tmp_path, model={"name": str(config(tmp_path).folder)})


def test_a_length_that_special_tokens_fill_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.sequence_length 2: the tokenizer adds 2 special tokens"):
        opened(tmp_path, data={"sequence_length": 2})


def test_an_end_token_within_a_text_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    rows = [f"film good {i},{i % 2}" for i in range(40)]
    (tmp_path / "data/validation.csv").write_text("\n".join(["text,label", *rows, ""]))
    longer = [f"x {row}" for row in rows]
    (tmp_path / "data/train.csv").write_text("\n".join(["text,label", *longer, "a [SEP] b,1", ""]))
    judgement_tokenizer().save_pretrained(tmp_path / "reader")
    model = {"name": "random:bart", "tokenizer": str(tmp_path / "reader")}
    with pytest.raises(oelm.OelmError, match=r"train, example 41: its text contains '\[SEP\]'"):
        opened(tmp_path, task="folder", data={"path": str(tmp_path / "data")}, model=model)


def test_the_sizes_of_a_pretrained_model_cannot_be_changed(tmp_path):
    """Neither in fine-tuning nor in language modelling; those of a fresh model can."""
    model = {"name": str(pretrained(tmp_path / "body")), "fields": {"num_hidden_layers": 1}}
    message = r"model\.fields: a pretrained model's config is fixed; set model\.from_scratch"
    with pytest.raises(ConfigError, match=message):
        opened(tmp_path, model=model)
    with pytest.raises(ConfigError, match=message):
        build_language_model(ModelConfig(**model), vocab_size=64, length=16, seed=0)
    assert opened(tmp_path, model={**model, "from_scratch": True}).config.num_hidden_layers == 1


def test_a_model_with_a_method_already_applied_is_refused(tmp_path):
    run_here(tmp_path)
    best = config(tmp_path).folder / "best"
    with pytest.raises(ConfigError, match="a method was applied to it already"):
        opened(tmp_path, model={"name": str(best)})


def test_a_model_folder_without_some_weights_is_refused(tmp_path):
    folder = pretrained(tmp_path / "body")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    kept = {name: value for name, value in tensors.items() if "layer.1." not in name}
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(oelm.OelmError, match=r"weights are not in the checkpoint, such as bert\.encoder\.layer\.1"):
        opened(tmp_path, model={"name": str(folder)})


def test_a_model_without_a_classification_head_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be given a classification head"):
        opened(tmp_path, model={"name": "random:vit"})


def test_a_model_that_does_not_generate_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"task\.form 'text' needs an encoder-decoder"):
        opened(tmp_path, task={"name": "builtin:sentiment", "form": "text"})


def test_texts_longer_than_the_model_reads_are_truncated_with_a_warning(tmp_path):
    result = run_here(tmp_path, data={"sequence_length": 6})
    assert any("training texts" in warning and "longer than 6 tokens: cut" in warning for warning in result["warnings"])
    roomy = oelm.RunConfig.load(fields(tmp_path, data={"sequence_length": 1000}))
    assert open_task(roomy).model_tokenizer.max_length == 64, "the small BERT has 64 positions"
    roberta = fields(tmp_path, data={"sequence_length": 1000})
    roberta["model"] = {"name": "random:roberta"}
    assert open_task(oelm.RunConfig.load(roberta)).model_tokenizer.max_length == 63, (
        "RoBERTa counts positions from after its padding id"
    )


@pytest.mark.parametrize(
    "arguments",
    [
        ["--method", "oelm-freeze", "method=baseline"],
        ["--seed", "0", "seed=4"],
        ["--model", "random:bert", "model.name=random:gpt2"],
        ["--out", "here", "output=there"],
    ],
)
def test_a_setting_given_twice_on_the_command_line_is_refused(arguments):
    refused = CliRunner().invoke(app, ["finetune", "builtin:sentiment", *arguments])
    assert refused.exit_code == 2
    assert f"{arguments[-1]}: an option sets this field too" in refused.output
