"""Invalid fine-tuning runs are refused before they start, with a message that says what to do."""

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


def build(tmp_path, **changes):
    """Open the task of a changed run and build its model."""
    run = oelm.RunConfig.load({**fields(tmp_path), **changes})
    return open_task(run).build_model(run)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "sst3"}, "sst3"),
        ({"task": {"name": "sst2", "texts": "x"}}, "task.texts: unknown key. Did you mean 'text'"),
        ({"train": {"max_steps": 5, "epochs": 1}}, "train.max_steps and train.epochs"),
        ({"task": {"name": "sst2", "source": "a", "target": "b"}}, "set form to 'text'"),
        ({"task": {"name": "folder", "form": "text", "source": "a"}}, "name both columns"),
        ({"task": {"name": "language", "form": "text"}}, "form 'text' belongs to a task with examples"),
        ({"task": {"name": "sst2", "form": "text"}, "eval": {"targets": [0.5]}}, "a text-to-text run has neither"),
        ({"task": "language", "eval": {"choose": "accuracy"}}, "the task 'language' can only use 'loss'"),
    ],
)
def test_an_invalid_config_is_refused(changes, message, tmp_path):
    with pytest.raises(oelm.OelmError) as error:
        build(tmp_path, **changes)
    assert message in str(error.value)


def test_a_fresh_model_on_real_data_needs_a_tokenizer(tmp_path):
    (tmp_path / "data").mkdir()
    for split in ("train", "dev"):
        rows = "".join(f"text {split} {i}\t{i % 2}\n" for i in range(20))
        (tmp_path / f"data/{split}.tsv").write_text(f"sentence\tlabel\n{rows}")
    with pytest.raises(ConfigError, match=r"model\.tokenizer: random:bert .* --train-bpe"):
        build(tmp_path, task="sst2", data={"path": str(tmp_path / "data")})
    with_tokenizer = {"name": "random:bert", "tokenizer": str(token_folder() / "tokenizer")}
    assert (
        build(tmp_path, task="sst2", data={"path": str(tmp_path / "data")}, model=with_tokenizer).config.vocab_size
        == 400
    )


def test_the_tokenizer_of_another_model_is_refused(tmp_path):
    tokenizer = judgement_tokenizer()
    small_model("bert", vocab_size=len(tokenizer) - 5).bert.save_pretrained(tmp_path / "less")
    small_model("bert", vocab_size=len(tokenizer) + 2000).bert.save_pretrained(tmp_path / "more")
    small_model("bert", vocab_size=len(tokenizer), pad_token_id=7).bert.save_pretrained(tmp_path / "other")
    tokenizer.save_pretrained(tmp_path / "reader")
    tokenizer_field = {"tokenizer": str(tmp_path / "reader")}
    for folder, message in (("less", "the tokenizer's has"), ("more", "not its tokenizer"), ("other", "pad token is")):
        with pytest.raises(ConfigError, match=message):
            build(tmp_path, model={"name": str(tmp_path / folder), **tokenizer_field})


def test_an_encoder_configured_as_a_decoder_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="random:bert-cross: an encoder run as a decoder"):
        build(tmp_path, model={"name": "random:bert-cross"})


def test_a_tokenizer_whose_padding_is_beyond_the_positions_is_refused(tmp_path):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(90)} | {"[END]": 90}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel(words, "w0")), eos_token="[END]")
    tokenizer.save_pretrained(tmp_path / "reader")
    with pytest.raises(ConfigError, match="counts positions from after its padding token"):
        build(tmp_path, model={"name": "random:roberta", "tokenizer": str(tmp_path / "reader")})


def test_the_folder_of_a_run_is_refused_as_a_model(tmp_path):
    run_here(tmp_path)
    with pytest.raises(ConfigError, match="oelm export RUN OUT"):
        build(tmp_path, model={"name": str(config(tmp_path).folder)})


def test_a_length_that_special_tokens_fill_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"data\.sequence_length 2: the tokenizer adds 2 special tokens"):
        build(tmp_path, data={"sequence_length": 2})


def test_an_end_token_within_a_text_is_refused(tmp_path):
    (tmp_path / "data").mkdir()
    rows = [f"film good {i},{i % 2}" for i in range(40)]
    (tmp_path / "data/validation.csv").write_text("\n".join(["text,label", *rows, ""]))
    longer = [f"x {row}" for row in rows]
    (tmp_path / "data/train.csv").write_text("\n".join(["text,label", *longer, "a [SEP] b,1", ""]))
    judgement_tokenizer().save_pretrained(tmp_path / "reader")
    model = {"name": "random:bart", "tokenizer": str(tmp_path / "reader")}
    with pytest.raises(oelm.OelmError, match=r"train, example 41: its text contains '\[SEP\]'"):
        build(tmp_path, task="folder", data={"path": str(tmp_path / "data")}, model=model)


def test_the_sizes_of_a_pretrained_model_cannot_be_changed(tmp_path):
    """Neither in fine-tuning nor in language modelling; those of a fresh model can."""
    model = {"name": str(pretrained(tmp_path / "body")), "fields": {"num_hidden_layers": 1}}
    message = r"model\.fields: .*model\.from_scratch"
    with pytest.raises(ConfigError, match=message):
        build(tmp_path, model=model)
    with pytest.raises(ConfigError, match=message):
        build_language_model(ModelConfig(**model), vocab_size=64, length=16, seed=0)
    assert build(tmp_path, model={**model, "from_scratch": True}).config.num_hidden_layers == 1


def test_a_model_with_a_method_already_applied_is_refused(tmp_path):
    run_here(tmp_path)
    best = config(tmp_path).folder / "best"
    with pytest.raises(ConfigError, match="a method was applied to it already"):
        build(tmp_path, model={"name": str(best)})


def test_a_model_folder_without_some_weights_is_refused(tmp_path):
    folder = pretrained(tmp_path / "body")
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    remaining = {name: value for name, value in tensors.items() if "layer.1." not in name}
    save_file(remaining, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(oelm.OelmError, match=r"weights are not in the checkpoint, such as bert\.encoder\.layer\.1"):
        build(tmp_path, model={"name": str(folder)})


def test_a_model_without_a_classification_head_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="cannot be given a classification head"):
        build(tmp_path, model={"name": "random:vit"})


def test_a_model_that_does_not_generate_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"task\.form 'text' needs an encoder-decoder"):
        build(tmp_path, task={"name": "builtin:sentiment", "form": "text"})


def test_texts_longer_than_the_model_reads_are_truncated_with_a_warning(tmp_path):
    result = run_here(tmp_path, data={"sequence_length": 6})
    assert any("training texts" in warning and "longer than 6 tokens" in warning for warning in result["warnings"])
    longer_than_model = oelm.RunConfig.load(fields(tmp_path, data={"sequence_length": 1000}))
    assert open_task(longer_than_model).model_tokenizer.max_length == 64, "the small BERT has 64 positions"
    roberta_fields = fields(tmp_path, data={"sequence_length": 1000})
    roberta_fields["model"] = {"name": "random:roberta"}
    assert open_task(oelm.RunConfig.load(roberta_fields)).model_tokenizer.max_length == 63, (
        "RoBERTa numbers its positions from one after the padding id"
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
    result = CliRunner().invoke(app, ["finetune", "builtin:sentiment", *arguments])
    assert result.exit_code == 2
    assert f"{arguments[-1]}: an option" in result.output
