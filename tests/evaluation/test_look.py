"""Looking inside runs and folders: one model, two, several texts and lengths, the checkpoints of a run."""

import shutil

import pytest

import oelm
from oelm.errors import ConfigError
from oelm.evaluation.look import look_at
from oelm.evaluation.look_sources import Texts
from oelm.runs.environment import git_commit
from oelm.runs.looks import MEASURES
from oelm.training.checkpoint import list_checkpoints
from oelm.training.engine import train
from tests.support.finetuning import fields
from tests.support.looks import TEXT, text_model
from tests.support.models import lively_model
from tests.support.training import config, run_here


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("look")
    changes = {"train": {"max_steps": 6}, "eval": {"every": 2}, "checkpoint": {"every": 2, "keep": 5}}
    run_here(folder, **changes)
    return config(folder, **changes).folder


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory):
    return text_model(tmp_path_factory.mktemp("gpt2"), "gpt2")


def test_a_run_is_looked_at_with_its_best_or_its_last_model(run):
    found = look_at([run], Texts((TEXT,)))
    (model,) = found.look.models
    assert found.look.git_commit == git_commit()
    assert model.model_class == "OelmGPTForCausalLM"
    assert "best model" in model.model
    assert look_at([run], Texts((TEXT,)), last=True).look.models[0].model == "the last checkpoint's model, of step 6"
    assert len(model.heads) == 2 * len(found.maps[0][0][0].weights)
    text = model.texts[0]
    assert "".join(text.tokens) == TEXT
    assert found.maps[0][0][0].weights.shape[1:] == (len(text.tokens),) * 2
    for head in model.heads:
        assert all(0 <= getattr(head, name) <= 1 for name in (*MEASURES, "induction"))
        assert 1 <= head.effective_rank <= head.rank <= head.full_rank
        assert head.spread == {}


def test_the_text_of_a_run_without_its_best_model_is_read_with_its_datas_tokenizer(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "best")
    looks = [look_at([folder], Texts((TEXT,)), last=True).look.models[0] for folder in (copy, run)]
    assert looks[0].texts[0] == looks[1].texts[0]


@pytest.mark.parametrize("name", ["bert", "t5"])
def test_a_fine_tuned_run_reads_texts_as_it_was_trained_to(name, tmp_path):
    """With the tokenizer beside its best model, and without that with its config's."""
    task = {"name": "builtin:sentiment", "form": "text"} if name == "t5" else "builtin:sentiment"
    settings = fields(tmp_path, task=task, train={"max_steps": 2}, eval={"generations": 0})
    run = oelm.RunConfig.load(settings | {"model": {"name": f"random:{name}"}})
    train(run, quiet=True)
    given = Texts(("the film is good",), ("very positive",) if name == "t5" else ())
    with_best = look_at([run.folder], given).look.models[0]
    shutil.rmtree(run.folder / "best")
    assert look_at([run.folder], given).look.models[0].texts[0].tokens == with_best.texts[0].tokens
    words = "".join(with_best.texts[0].tokens)
    assert "film" in words


@pytest.mark.parametrize("name", ["bert", "t5", "bart", "albert", "mpnet", "distilbert"])
def test_other_families_are_looked_at(name, tmp_path):
    """Encoder-decoders read a second text; ALBERT's one block serves three layers."""
    encoder_decoder = name in ("t5", "bart")
    given = Texts((TEXT,), ("The dog",) if encoder_decoder else ())
    (model,) = look_at([text_model(tmp_path, name)], given).look.models
    kinds = {head.kind for head in model.heads}
    assert kinds == ({"encoder", "decoder", "cross"} if encoder_decoder else {"encoder"})
    assert len(model.heads) == (8 if encoder_decoder else 3) * 4
    for head in model.heads:
        assert head.effective_rank > 1
        assert (head.previous is None) == (head.induction is None) == (head.kind == "cross")
    if encoder_decoder:
        assert model.texts[0].target_tokens is not None


def test_an_applied_folder_and_its_export_are_alike(tmp_path):
    folder = text_model(tmp_path / "plain", "gpt2")
    model = lively_model("gpt2", vocab_size=300)
    oelm.apply(model, "identity-key")
    model.save_pretrained(tmp_path / "applied")
    oelm.export(model, tmp_path / "exported")
    for name in ("applied", "exported"):
        for file in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copyfile(folder / file, tmp_path / name / file)
    applied, exported = tmp_path / "applied", tmp_path / "exported"
    same = look_at([applied, exported], Texts((TEXT,))).look
    for head in same.differences:
        assert head.distance == pytest.approx(0, abs=1e-5)
        assert all(change == pytest.approx(0, abs=1e-4) for change in head.differences.values())
    other = look_at([folder, applied], Texts((TEXT,))).look
    assert max(head.distance for head in other.differences) > 0.05


def test_differences_are_the_second_less_the_first(gpt2, tmp_path):
    other = text_model(tmp_path, "llama")
    found = look_at([gpt2, other], Texts((TEXT,))).look
    first, second = (model.heads[5] for model in found.models)
    change = found.differences[5]
    assert (change.layer, change.head) == (first.layer, first.head) == (1, 1)
    assert change.differences["previous"] == pytest.approx(second.previous - first.previous)
    assert change.differences["effective_rank"] == pytest.approx(second.effective_rank - first.effective_rank)
    assert 0 < change.distance < 1


def test_models_that_read_other_tokens_have_no_distance(gpt2, run):
    found = look_at([gpt2, run], Texts((TEXT,))).look
    assert found.models[0].texts[0].tokens != found.models[1].texts[0].tokens
    assert found.differences
    assert all(head.distance is None for head in found.differences)


def test_models_without_a_kind_of_attention_in_common_have_no_differences(gpt2, tmp_path):
    assert look_at([gpt2, text_model(tmp_path, "bert")], Texts((TEXT,))).look.differences == []


def test_texts_and_lengths_are_averaged_and_their_spread_is_given(gpt2):
    (model,) = look_at([gpt2], Texts((TEXT, "A cat and a dog sat on a mat."), contexts=(5, 10))).look.models
    assert [len(text.tokens) for text in model.texts] == [5, 10, 5, 10]
    for index, head in enumerate(model.heads):
        values = [text.heads[index].previous for text in model.texts]
        assert head.previous == pytest.approx(sum(values) / 4)
        assert head.spread["previous"] == pytest.approx(max(values) - min(values))
    longer = look_at([gpt2], Texts((TEXT,), contexts=(5,))).look.models[0].texts[0]
    assert longer.heads == model.texts[0].heads, "what stands behind is not read"


def test_drift_is_the_distance_of_every_checkpoint_from_the_last(run):
    found = look_at([run], Texts((TEXT,)), drift=True).look
    assert found.drift.steps == [2, 4, 6]
    assert found.models[0].model == "the last checkpoint's model, of step 6"
    for head in found.drift.heads:
        first, second, last = head.distances
        assert first > second > last == 0


def test_chosen_layers_alone_are_looked_at(gpt2):
    found = look_at([gpt2], Texts((TEXT,)), layers=(2, 0))
    assert {head.layer for head in found.look.models[0].heads} == {0, 2}
    assert [own.layer for own in found.maps[0][0]] == [0, 2]
    whole = look_at([gpt2], Texts((TEXT,))).look.models[0]
    assert [head for head in whole.heads if head.layer != 1] == found.look.models[0].heads


@pytest.mark.parametrize("name", ["gpt2-cross", "bert-cross"])
def test_cross_attention_to_another_model_is_left_out_and_said(name, tmp_path):
    (model,) = look_at([text_model(tmp_path, name)], Texts((TEXT,))).look.models
    assert model.without_cross
    assert {head.kind for head in model.heads} == {"decoder"}


def test_layers_that_only_a_decoder_has_are_looked_at_there(tmp_path):
    (model,) = look_at([text_model(tmp_path, "t5")], Texts((TEXT,), ("The dog",)), layers=(2,)).look.models
    assert {(head.kind, head.layer) for head in model.heads} == {("decoder", 2), ("cross", 2)}
    assert not model.without_cross


def test_a_run_on_a_generated_task_reads_a_sequence_of_its_own(tmp_path):
    changes = {
        "task": "generated:recall",
        "data": {"path": None, "sequence_length": 32},
        "train": {"max_steps": 2},
        "eval": {"every": 2},
    }
    run_here(tmp_path, **changes)
    folder = config(tmp_path, **changes).folder
    (model,) = look_at([folder], Texts()).look.models
    assert model.texts[0].text is None
    assert len(model.texts[0].tokens) > 16
    with pytest.raises(ConfigError, match="its tokens are numbers without a text; leave out --text"):
        look_at([folder], Texts((TEXT,)))


@pytest.mark.parametrize(
    ("given", "options", "message"),
    [
        (Texts(), {}, "give a text to look at"),
        (Texts(("",)), {}, "text 1: is 0 tokens long"),
        (Texts((TEXT, "a")), {}, "text 2: is 1 token long; how a head looks at other tokens needs two"),
        (Texts((TEXT * 10,)), {}, r"text 1: \d+ tokens, and the model has 64 positions; .* --context 64"),
        (Texts((TEXT,), contexts=(60,)), {}, r"--context 60: text 1 has \d\d tokens"),
        (Texts((TEXT,), ("a b",)), {}, "a GPT2LMHeadModel reads one text; leave out --target"),
        (Texts((TEXT,)), {"layers": (1, 3)}, "--layer 3: the model has layers 0 to 2"),
        (Texts((TEXT,)), {"drift": True}, "this is no run's folder"),
        (Texts((TEXT,)), {"last": True}, "--last is for a run"),
    ],
)
def test_what_cannot_be_looked_at_is_refused(given, options, message, gpt2):
    with pytest.raises(ConfigError, match=message):
        look_at([gpt2], given, **options)


def test_an_encoder_decoder_needs_a_text_for_its_decoder(tmp_path):
    folder = text_model(tmp_path, "t5")
    with pytest.raises(ConfigError, match="reads two texts: --text for its encoder, and --target"):
        look_at([folder], Texts((TEXT,)))
    with pytest.raises(ConfigError, match="2 times --target for 3 texts"):
        look_at([folder], Texts((TEXT,) * 3, ("one dog", "two dogs")))


def test_a_model_of_pictures_is_refused(tmp_path):
    folder = text_model(tmp_path, "bert")
    lively_model("vit").save_pretrained(folder)
    with pytest.raises(ConfigError, match="ViTForImageClassification reads pixel_values, not text"):
        look_at([folder], Texts((TEXT,)))


def test_another_models_tokenizer_is_refused(tmp_path):
    folder = text_model(tmp_path, "gpt2")
    lively_model("gpt2", vocab_size=100).save_pretrained(folder)
    with pytest.raises(ConfigError, match="and the model has 100: is it another model's tokenizer"):
        look_at([folder], Texts((TEXT,)))


def test_drift_needs_two_checkpoints(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    for folder in list_checkpoints(copy / "checkpoints")[:-1]:
        shutil.rmtree(folder)
    with pytest.raises(ConfigError, match="has one checkpoint, and --drift needs two"):
        look_at([copy], Texts((TEXT,)), drift=True)
