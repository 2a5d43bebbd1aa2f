"""Bad input raises an OelmError that says what is wrong and what would be right, and leaves the model unchanged."""

import copy
import hashlib
import math
from typing import Any

import numpy
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import CausalLMOutput

import oelm
from oelm import FamilyError, Method, MethodError, ModelError
from oelm.method.families import _FAMILIES
from oelm.models.small import small_model

FREEZE = "oelm-freeze"


def digest(value: Any) -> Any:
    """Return a comparable summary of any value of a state dict."""
    if isinstance(value, tuple):
        return tuple(digest(part) for part in value)
    if not isinstance(value, Tensor):
        return repr(value)
    if value.is_meta:
        return (value.dtype, tuple(value.shape))
    plain = value.int_repr() if value.is_quantized else value
    plain = plain.full_tensor() if hasattr(plain, "full_tensor") else plain
    data = plain.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return (value.dtype, tuple(value.shape), hashlib.sha256(data).hexdigest())


def snapshot(model: nn.Module) -> dict[str, Any]:
    """Return everything about a model that a failed apply must leave unchanged."""
    config = getattr(model, "config", None)
    return {
        "tensors": {name: digest(value) for name, value in model.state_dict().items()},
        "trainable": {name: parameter.requires_grad for name, parameter in model.named_parameters()},
        "modules": {name: (id(module), type(module)) for name, module in model.named_modules()},
        "training": {name: module.training for name, module in model.named_modules()},
        "config": (id(config), config.to_dict() if isinstance(config, PreTrainedConfig) else None),
    }


def refusal(model: nn.Module, method: Any = FREEZE, **options: Any) -> Exception:
    """Return the error that apply raises, after checking that the model is unchanged."""
    before = snapshot(model)
    with pytest.raises(oelm.OelmError) as error:
        oelm.apply(model, method, **options)
    assert snapshot(model) == before
    return error.value


def assert_refused(model: nn.Module, method: Any, kind: type[Exception], *parts: str, **options: Any) -> None:
    """Assert that apply raises an error of this class whose message contains the parts, and changes nothing."""
    error = refusal(model, method, **options)
    assert type(error) is kind, repr(error)
    for part in parts:
        assert part in str(error), str(error)


# Methods that are malformed in themselves


@pytest.mark.parametrize(
    ("method", "parts"),
    [
        ("oelm-frezee", ["'oelm-frezee'", "Did you mean 'oelm-freeze'?", "Presets: baseline, oelm-freeze"]),
        ("", ["unknown preset ''", "Presets: baseline"]),
        ({"preset": "oelm-cor"}, ["Did you mean 'oelm-core'?"]),
        (3, ["a preset's name", "not int"]),
        (None, ["a preset's name", "not NoneType"]),
        ({"corre": "gain"}, ["corre: unknown key", "Did you mean 'core'?", "Known keys: q, k, ffn"]),
        ({"q": {"inti": "qr"}}, ["q.inti: unknown key", "Did you mean 'init'?", "scope"]),
        ({"preset": FREEZE, "k": {"scal": 4}}, ["k.scal: unknown key", "Did you mean 'scale'?"]),
        ({"ffn": {"scale": 2}}, ["ffn.scale: unknown key", "Known keys: frozen, std, init"]),
        ({"presett": "oelm-freeze"}, ["presett: unknown key. Did you mean 'preset'? Known keys: q, k, ", ", preset"]),
        ({3: 4}, ["3: Keys should be strings"]),
        ({"q": "qr"}, ["q: ", "'qr'"]),
        ({"q": {"init": "ortho"}}, ["q.init", "'orthogonal'", "(got 'ortho')"]),
        ({"q": {"scale": 0}}, ["q.scale", "greater than 0", "(got 0)"]),
        ({"k": {"scale": -2.5}}, ["k.scale", "greater than 0", "(got -2.5)"]),
        ({"k": {"scale": math.inf}}, ["k.scale", "finite"]),
        ({"k": {"scale": math.nan}}, ["k.scale", "finite"]),
        ({"q": {"frozen": "maybe"}}, ["q.frozen", "boolean", "'maybe'"]),
        ({"q": {"init": "qr", "std": 0.02}}, ["q: std belongs to init 'gaussian', not to 'qr'"]),
        ({"ffn": {"std": 0.02}}, ["ffn: std belongs to init 'gaussian', not to 'default'"]),
        ({"q": {"init": "gaussian"}}, ["q: init 'gaussian' needs std", "0.02", "'matched'"]),
        ({"q": {"init": "gaussian", "std": 0}}, ["q.std", "greater than 0", "'matched'"]),
        ({"q": {"init": "identity"}}, ["q: init 'identity'", "set frozen to true"]),
        ({"ffn": {"init": "identity"}}, ["ffn.init", "(got 'identity')"]),
        ({"core": "diagonal"}, ["core", "'none', 'gain' or 'matrix'", "(got 'diagonal')"]),
        ({"core": "gain"}, ["core 'gain' sits between two frozen bases", "freeze both"]),
        ({"preset": "oelm-exact", "k": {"frozen": False}}, ["core 'matrix'", "freeze both"]),
        ({"biases": "zero"}, ["biases", "'frozen' or 'trained'"]),
        ({"preset": FREEZE, "attention": "encoder"}, ["attention", "'all'", "(got 'encoder')"]),
        ({"preset": FREEZE, "attention": []}, ["attention []", "at least one kind"]),
        ({"preset": FREEZE, "attention": ["self"]}, ["attention.0", "'encoder', 'decoder' or 'cross'"]),
        ({"preset": FREEZE, "layers": "first:0"}, ["layers 'first:0'", "'first:N'", "N from 1"]),
        ({"layers": "first:1"}, ["layers", "the method would change nothing", "'baseline'"]),
        ({"preset": "baseline", "attention": ["cross"]}, ["attention", "the method would change nothing"]),
        ({"preset": FREEZE, "schedule": {"kind": "freeze"}}, ["schedule", "'freeze'", "steps []"]),
        ({"preset": FREEZE, "schedule": {"kind": "unfreeze", "steps": [5, 2]}}, ["schedule", "[5, 2] must rise"]),
        ({"preset": FREEZE, "schedule": {"stpes": [5]}}, ["schedule.stpes: unknown key", "'steps'"]),
        ({"preset": "oelm-nofreeze", "schedule": {"kind": "unfreeze", "steps": [5]}}, ["no matrix is frozen"]),
        ({"preset": "identity-key", "schedule": {"kind": "unfreeze", "steps": [5]}}, ["identity has no matrix"]),
    ],
)
def test_a_malformed_method_is_refused(method, parts):
    assert_refused(small_model("bert"), method, MethodError, *parts)


def test_the_constructors_refuse_malformed_methods_too():
    with pytest.raises(MethodError, match=r"Method: coer: unknown key\. Did you mean 'core'\?"):
        Method(coer="gain")
    with pytest.raises(MethodError, match=r"Method: q\.scale: .*greater than 0"):
        Method(q={"scale": 0})
    with pytest.raises(MethodError, match="Projection: init 'gaussian' needs std"):
        oelm.Projection(init="gaussian")


@pytest.mark.parametrize("seed", [-3, "0", 1.0, True, None, [1]])
def test_a_seed_that_is_not_a_non_negative_integer_is_refused(seed):
    assert_refused(small_model("bert"), FREEZE, MethodError, "seed", f"not {seed!r}", seed=seed)


# Methods that do not fit the model


HADAMARD = {"k": {"init": "hadamard", "frozen": True}}


@pytest.mark.parametrize(
    ("name", "method", "parts"),
    [
        ("bert", {"preset": FREEZE, "layers": [1, 7]}, ["layers [7]", "0 to 2"]),
        ("bert", {"preset": FREEZE, "layers": "first:4"}, ["layers 'first:4'", "3 layers"]),
        ("bert", {"preset": FREEZE, "layers": "except-last:3"}, ["layers 'except-last:3'", "3 layers"]),
        ("albert", {"preset": FREEZE, "layers": "first:1"}, ["layers 'first:1'", "one attention module"]),
        ("bert", {"preset": FREEZE, "attention": ["cross"]}, ["attention cross", "only encoder"]),
        ("t5", {"preset": "oelm-ffn", "attention": ["cross"]}, ["feed-forward", "name none"]),
        ("bert", {"preset": "oelm-qk-ffn", "freeze_ratio": 0.9}, ["freeze_ratio 0.9", "72.9%"]),
        ("gemma", "identity-query", ["layers.0.self_attn.q_proj", "4 x 16 is not 48", "'orthogonal'"]),
        ("gemma", "oelm-global", ["q_proj", "64 rows of width 48", "scope 'head'"]),
        ("qwen3", {"preset": FREEZE, "k": {"scale": 2}}, ["k_proj", "scale 2.0", "norm", "use scale 1"]),
        ("qwen3", {"preset": FREEZE, "core": "gain"}, ["gain", "norm", "core 'matrix'"]),
        ("bert", {"preset": "oelm-exact", "q": {"scope": "global"}}, ["query", "scope 'head'"]),
    ],
)
def test_a_method_that_does_not_fit_the_model_is_refused(name, method, parts):
    assert_refused(small_model(name), method, MethodError, *parts)


def test_a_width_without_a_hadamard_matrix_is_refused():
    model = small_model("bert", hidden_size=56)
    assert_refused(model, HADAMARD, MethodError, "key (k)", "width 56", "2^m, 12*2^m or 20*2^m", "'orthogonal'")


def test_heads_wider_than_the_hidden_state_are_refused():
    model = small_model("gemma", head_dim=64)
    assert_refused(model, FREEZE, MethodError, "q_proj", "64 rows of width 48")


def test_a_scale_that_overflows_the_dtype_is_refused():
    method = {"preset": FREEZE, "k": {"scale": 1e6}}
    assert_refused(small_model("bert").half(), method, MethodError, "key.weight", "1e+06 overflows torch.float16")


# Models that no method can be applied to


@pytest.mark.parametrize("method", [FREEZE, {"q": {"init": "polar"}}, {"q": {"init": "pretrained", "scale": 2}}])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused(method, value):
    model = small_model("bert")
    with torch.no_grad():  # in the last layer: apply has computed the other layers by then, but must not change them
        model.bert.encoder.layer[2].attention.self.query.weight[0, 0] = value
    assert_refused(model, method, ModelError, "layer.2.attention.self.query.weight", "not finite")


def test_heads_that_do_not_divide_the_rows_are_refused():
    model = small_model("bert")
    model.config.num_attention_heads = 5
    assert_refused(model, FREEZE, FamilyError, "layer.0.attention.self.query", "48 rows", "5 heads")
    model = small_model("gpt2")
    model.config.n_head = 5
    assert_refused(model, FREEZE, FamilyError, "h.0.attn.c_attn", "144 rows", "5 query and 2 x 5")
    model = small_model("llama")
    model.config.num_key_value_heads = 3
    assert_refused(model, FREEZE, FamilyError, "4 query heads", "3 key-value heads")


def test_a_config_with_another_number_of_layers_is_refused():
    model = small_model("bert")
    model.config.num_hidden_layers = 5
    assert_refused(model, FREEZE, FamilyError, "calls for 5 blocks", "bert.encoder.layer.*", "there are 3")


@pytest.mark.parametrize("part", ["attention.self.key", "intermediate", "output.dense"])
def test_a_block_without_one_of_its_modules_is_refused(part):
    model = small_model("bert")
    owner, _, name = f"bert.encoder.layer.1.{part}".rpartition(".")
    delattr(model.get_submodule(owner), name)
    assert_refused(model, "oelm-qk-ffn", FamilyError, f"layer.1.{part}", "register_family")


def test_a_model_with_another_method_is_refused():
    model = small_model("gpt2")
    report = oelm.apply(model, FREEZE)
    assert oelm.apply(model, FREEZE) == report  # applying the same method again changes nothing
    assert_refused(model, "oelm-random", ModelError, "'oelm-freeze' (seed 0)", "'oelm-random' (seed 0)", "fresh model")
    assert_refused(model, FREEZE, ModelError, "'oelm-freeze' (seed 1)", seed=1)
    assert_refused(model, {"preset": FREEZE, "layers": [0]}, ModelError, "'custom'")


def test_objects_that_are_not_hugging_face_models_are_refused():
    with pytest.raises(
        ModelError, match=r"not str: load it first, such as AutoModel.from_pretrained\(.bert-base-uncased.\)"
    ):
        oelm.apply("bert-base-uncased")
    assert_refused(nn.Linear(3, 3), FREEZE, FamilyError, "Linear has no config.model_type", "Hugging Face")


def test_a_part_with_a_method_of_its_own_is_named():
    """The whole model's config, which is what save_pretrained saves, has no record of it."""
    model = small_model("bert")
    oelm.apply(model.bert, FREEZE)
    assert_refused(model, FREEZE, ModelError, "applied to a part of this BertForSequenceClassification, bert:")
    with pytest.raises(oelm.FreezeError, match="only its part 'bert' does: apply it to the whole model"):
        oelm.verify(model)
    assert oelm.verify(model.bert).exact == 12


def test_a_part_of_a_model_with_a_method_is_sent_to_the_whole_one(tmp_path):
    model = small_model("bert")
    oelm.apply(model, FREEZE)
    message = "a part of the model that oelm.apply was called on: verify, save and load the whole model"
    with pytest.raises(oelm.FreezeError, match=message):
        oelm.verify(model.bert)
    model.bert.save_pretrained(tmp_path)
    with pytest.raises(oelm.FreezeError, match=message):
        oelm.load(tmp_path)


@pytest.mark.parametrize("other", ["key", "value"])
def test_a_matrix_that_is_tied_to_another_is_refused(other):
    model = small_model("bert")
    attention = model.bert.encoder.layer[1].attention.self
    getattr(attention, other).weight = attention.query.weight
    assert_refused(model, FREEZE, ModelError, f"attention.self.query and bert.encoder.layer.1.attention.self.{other}")


def test_whole_numbers_of_numpy_are_seeds():
    seeded, same = small_model("bert"), small_model("bert")
    oelm.apply(seeded, "oelm-random", seed=numpy.int64(3))
    oelm.apply(same, "oelm-random", seed=3)
    assert seeded.config.oelm == same.config.oelm
    assert_refused(small_model("bert"), FREEZE, MethodError, "seed must be", seed=numpy.float64(3))


def test_a_report_that_is_taken_for_the_model_says_where_the_model_is():
    report = oelm.apply(small_model("bert"), FREEZE)
    with pytest.raises(AttributeError, match=r"no 'train'.* the model itself is changed in place"):
        report.train()
    assert copy.deepcopy(report) == report


@pytest.mark.usefixtures("process_group")
def test_a_wrapped_model_is_refused():
    from torch.distributed.fsdp import fully_shard
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(small_model("bert"))
    assert_refused(wrapped, FREEZE, ModelError, "DistributedDataParallel", "then wrap it")
    sharded = fully_shard(small_model("bert"))
    assert_refused(sharded, FREEZE, ModelError, "FSDPBertForSequenceClassification")
    blocks = small_model("bert")
    fully_shard(blocks.bert.encoder.layer[1])
    assert_refused(blocks, FREEZE, ModelError, "bert.encoder.layer.1 is wrapped in FSDPBertLayer")


def test_a_data_parallel_model_is_refused():
    assert_refused(nn.DataParallel(small_model("bert")), FREEZE, ModelError, "wrapped in DataParallel")


def test_a_compiled_model_is_refused():
    assert_refused(torch.compile(small_model("bert")), FREEZE, ModelError, "compiled", "apply the method first")


def test_a_model_without_values_is_refused():
    with torch.device("meta"):
        model = transformers.BertForSequenceClassification(small_model("bert").config)
    assert_refused(
        model, FREEZE, ModelError, "word_embeddings.weight is on the meta device", "load the model's weights"
    )


@pytest.mark.filterwarnings("ignore")
def test_a_quantised_model_is_refused():
    model = torch.ao.quantization.quantize_dynamic(small_model("bert"), {nn.Linear}, dtype=torch.qint8)
    assert_refused(model, FREEZE, ModelError, "query is a torch.ao.nn.quantized.dynamic", "quantised")
    model = small_model("bert")
    value = model.bert.encoder.layer[2].attention.self.key.weight.detach().to(torch.float8_e4m3fn)
    model.bert.encoder.layer[2].attention.self.key.weight = nn.Parameter(value, requires_grad=False)
    assert_refused(model, FREEZE, ModelError, "layer.2.attention.self.key.weight", "float8_e4m3fn", "quantised")


class Adapted(nn.Linear):
    """An example of the many layers that subclass Linear and compute something else."""


@pytest.mark.parametrize("role", ["query", "key"])
def test_a_subclass_of_linear_is_refused(role):
    model = small_model("bert")
    setattr(model.bert.encoder.layer[2].attention.self, role, Adapted(48, 48))
    assert_refused(model, FREEZE, ModelError, f"layer.2.attention.self.{role} is a", "Adapted", "plain Linear")


def test_a_subclass_of_a_fused_projection_is_refused():
    model = small_model("gpt2")
    model.transformer.h[2].attn.c_attn.__class__ = type("Quantised", (transformers.pytorch_utils.Conv1D,), {})
    assert_refused(model, FREEZE, ModelError, "h.2.attn.c_attn is a", "Quantised")


def test_layers_that_the_method_does_not_touch_may_be_of_any_class():
    model = small_model("bert")
    model.classifier = Adapted(48, 2)
    model.bert.encoder.layer[0].output.dense = Adapted(96, 48)
    report = oelm.apply(model, FREEZE)
    assert report.frozen == 3 * 2 * (48 * 48 + 48)
    for layer in (model.classifier, model.bert.encoder.layer[0].output.dense):
        assert type(layer) is Adapted
        assert layer.weight.requires_grad


# A model type that oelm does not know, and registering it


class OwnConfig(PreTrainedConfig):
    model_type = "own-type"

    vocab_size: int = 30
    hidden_size: int = 16
    num_hidden_layers: int = 2
    num_attention_heads: int = 2


class OwnAttention(nn.Module):
    def __init__(self, config):
        super().__init__()
        width = config.hidden_size
        self.heads = config.num_attention_heads
        self.wq, self.wk = nn.Linear(width, width), nn.Linear(width, width)
        self.wv, self.wo = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, hidden):
        q, k, v = (w(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class OwnBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.attn = OwnAttention(config)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, hidden):
        hidden = hidden + self.attn(hidden)
        return hidden + self.down(self.up(hidden).relu())


class OwnModel(PreTrainedModel):
    config_class = OwnConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        self.blocks = nn.ModuleList([OwnBlock(config) for _ in range(config.num_hidden_layers)])
        self.head = nn.Linear(config.hidden_size, config.vocab_size)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, labels=None):
        hidden = self.embed(input_ids)
        for block in self.blocks:
            hidden = block(hidden)
        logits = self.head(hidden)
        loss = None if labels is None else F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return CausalLMOutput(loss=loss, logits=logits)


@pytest.fixture
def own_type():
    yield OwnConfig.model_type
    _FAMILIES.pop(OwnConfig.model_type, None)


def register_own_family(**changes):
    paths = {"block": "blocks.*", "q": "attn.wq", "k": "attn.wk", "v": "attn.wv", "o": "attn.wo"}
    ffn = {"ffn_in": "up", "ffn_out": "down", "kind": "decoder"}
    return oelm.register_family(OwnConfig.model_type, **{**paths, **ffn, **changes})


def test_the_error_for_an_unknown_model_type_shows_how_to_register_it(own_type):
    """Its modules' names are read, so they are nobody else's; tests/method/test_guess.py has those of every family."""
    model = OwnModel(OwnConfig())
    error = str(refusal(model))
    assert "unknown model_type 'own-type'" in error
    assert "q='attn.wq'" in error
    call = error[error.index("oelm.register_family(") : error.rindex("\n")]
    eval(call, {"oelm": oelm})  # the call in the message works
    assert oelm.apply(model, FREEZE).frozen == 2 * 2 * (16 * 16 + 16)
    bert = small_model("bert")
    bert.config.model_type = "brt"
    assert_refused(bert, FREEZE, FamilyError, "unknown model_type 'brt'", "Did you mean 'bert'?")


def test_a_family_whose_blocks_are_elsewhere_is_refused(own_type):
    register_own_family(block="encoder.layer.*")
    model = OwnModel(OwnConfig())
    assert_refused(model, FREEZE, FamilyError, "found no attention of family 'own-type'", "encoder.layer.*")


@pytest.mark.parametrize("method", [FREEZE, "oelm-exact", "identity-query", "oelm-qk-ffn"])
def test_a_registered_family_can_be_trained_saved_loaded_and_exported(own_type, method, tmp_path):
    from oelm.method.diagnose import diagnose

    register_own_family()
    model = OwnModel(OwnConfig())
    result = diagnose(model, method)
    assert result.healthy
    assert {row.role for row in result.report.rows} == {"q", "k", "v", "o", "ffn_in", "ffn_out"}
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = model.eval()(ids).logits
        model.save_pretrained(tmp_path / "operated")
        with pytest.raises(oelm.CheckpointError):
            oelm.load(tmp_path / "operated")  # transformers does not know the class
        loaded = oelm.load(tmp_path / "operated", model_class=OwnModel).eval()
        assert type(loaded) is OwnModel
        assert torch.equal(loaded(ids).logits, expected)
        oelm.export(loaded, tmp_path / "plain")
        plain = OwnModel.from_pretrained(tmp_path / "plain").eval()
        torch.testing.assert_close(plain(ids).logits, expected)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block": ""}, "name the block's path"),
        ({"k": ""}, "no path for k"),
        ({"q": "", "v": ""}, "no path for q, v"),
        ({"q": "", "k": "", "v": "", "o": "", "fused": oelm.Fused("attn.qkv")}, "no path for o, whose width"),
        ({"k": "attn.wq"}, "two of q, k, v, o have the same path"),
        ({"kind": "causal"}, "kind is 'causal'; use one of encoder, decoder, cross"),
        ({"heads": 4}, "heads is 4, not the name of a config field, or a function of the config such as lambda"),
        ({"block": ["blocks.*"]}, r"block is \['blocks\.\*'\], not a path"),
        ({"fused": "attn.qkv"}, r"fused is 'attn\.qkv', not an oelm\.Fused"),
        ({"divisor": 1.0}, "divisor is 1.0, not a function of the config"),
        ({"rotary": "yes"}, "rotary is 'yes', not True or False"),
    ],
)
def test_a_family_that_no_model_can_have_is_refused(own_type, changes, message):
    with pytest.raises(FamilyError, match=message):
        register_own_family(**changes)
    assert own_type not in _FAMILIES


@pytest.mark.parametrize(("model_type", "given"), [("", "''"), (None, "of type NoneType"), (OwnModel, "of type type")])
def test_a_model_type_that_is_no_name_is_refused(model_type, given):
    with pytest.raises(FamilyError, match=f"model_type is {given}, not what config.model_type says"):
        oelm.register_family(model_type, family="bert")


def test_an_order_of_fused_rows_that_does_not_exist_is_refused():
    with pytest.raises(FamilyError, match="layout is 'group'; use 'blocks' or 'groups'"):
        oelm.Fused("attn.qkv", layout="group")


def test_a_path_without_a_module_is_refused(own_type):
    register_own_family(k="attn.key")
    assert_refused(OwnModel(OwnConfig()), FREEZE, FamilyError, "no module 'blocks.0.attn.key'", "replace_existing=True")


def test_a_field_that_the_config_does_not_have_is_refused(own_type):
    register_own_family(heads="n_heads")
    assert_refused(OwnModel(OwnConfig()), FREEZE, FamilyError, "'own-type' has no field 'n_heads'")


SEPARATE = {name: f"self_attn.{name}_proj" for name in ("q", "k", "v", "o")}
FUSED = {"fused": oelm.Fused("self_attn.qkv_proj"), "o": "self_attn.o_proj"}


def as_own_type(model):
    """Return a model of a known family as one of an unknown type, to be registered in a test's own way."""
    model.config.model_type = OwnConfig.model_type
    return model


@pytest.mark.parametrize(
    ("name", "paths", "message"),
    [
        ("llama", SEPARATE, "0.self_attn.k_proj: 24 rows are not 4 key-value heads of 12 but 2: its"),
        (
            "phi3",
            FUSED,
            "qkv_proj: 96 rows are not 4 query heads and 2 x 4 key-value heads of 12 but 2: its family has",
        ),
    ],
)
def test_a_grouped_model_registered_without_its_key_value_heads_is_refused(name, paths, message, own_type):
    """Its key heads would be orthonormal in groups of rows that the model does not use as heads."""
    model = as_own_type(small_model(name))
    oelm.register_family(own_type, block="layers.*", kind="decoder", rotary=True, **paths)
    assert_refused(model, FREEZE, FamilyError, message, "kv_heads='num_key_value_heads'", "replace_existing=True")
    with pytest.raises(FamilyError, match="key-value heads"):
        oelm.audit(model)
    known = {"block": "layers.*", "kind": "decoder", "rotary": True, "kv_heads": "num_key_value_heads", **paths}
    oelm.register_family(own_type, replace_existing=True, **known)
    assert oelm.apply(model, FREEZE).frozen > 0


def test_fields_that_disagree_with_the_modules_are_refused(own_type):
    model = as_own_type(small_model("llama"))
    layout = {"block": "layers.*", "kind": "decoder", **SEPARATE}
    oelm.register_family(own_type, **layout, kv_heads="num_attention_heads")
    wrong = "24 rows are not 4 key-value heads of 12, as heads='num_attention_heads' and kv_heads='num_attention_heads'"
    assert_refused(model, FREEZE, FamilyError, wrong)
    layout |= {"v": "mlp.gate_proj", "kv_heads": "num_key_value_heads"}
    oelm.register_family(own_type, replace_existing=True, **layout)
    rows = model.get_submodule("model.layers.0.mlp.gate_proj").out_features
    assert_refused(model, FREEZE, FamilyError, f"gate_proj: {rows} rows are not 2 key-value heads of 12")


def test_heads_that_fit_the_rows_but_not_the_attention_are_refused(own_type):
    """Twice as many heads of half the size cut every matrix, but the model uses other rows as heads."""
    model = as_own_type(small_model("llama"))
    halves = {"heads": lambda config: 8, "kv_heads": lambda config: 4}
    oelm.register_family(own_type, block="layers.*", kind="decoder", **SEPARATE, **halves)
    message = "q_proj: its attention has heads of 12, and heads=a function of its family makes them 6"
    assert_refused(model, FREEZE, FamilyError, message)
    oelm.register_family(own_type, replace_existing=True, block="layers.*", **SEPARATE, kv_heads=lambda config: 0)
    assert_refused(model, FREEZE, FamilyError, "a function gives 0, not a number above 0")


def test_a_family_is_given_by_the_name_of_a_known_type(own_type):
    model = as_own_type(small_model("llama"))
    assert oelm.register_family(own_type, family="llama") is _FAMILIES["llama"]
    assert oelm.apply(model, FREEZE) == oelm.apply(small_model("llama"), FREEZE)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("lama", "family is 'lama', neither an oelm.Family nor a known model type. Did you mean 'llama'? Known: alb"),
        (oelm.Stack, "family is <class 'oelm.method.families.Stack'>, neither"),
    ],
)
def test_a_family_that_does_not_exist_is_refused_at_once(family, message):
    with pytest.raises(FamilyError) as caught:
        oelm.register_family("own-type", family=family)
    assert message in str(caught.value)
    assert "own-type" not in _FAMILIES


@pytest.mark.parametrize(
    ("family", "field"), [("bert", "is_decoder"), ("gemma2", "query_pre_attn_scalar"), ("qwen3", None)]
)
def test_a_family_that_reads_other_fields_of_the_config_is_refused(own_type, family, field):
    oelm.register_family(own_type, family=family)
    model = as_own_type(small_model("llama"))
    if field is None:
        oelm.apply(model, FREEZE)
    else:
        assert_refused(model, FREEZE, FamilyError, f"has no field '{field}', which its family reads", "register_family")


def test_paths_beside_a_whole_family_are_refused():
    with pytest.raises(FamilyError, match="block, q would be ignored"):
        oelm.register_family("own-type", family="llama", block="layers.*", q="attn.q")


def test_replacing_a_known_family_must_be_explicit(own_type):
    register_own_family()
    with pytest.raises(FamilyError, match="replace_existing=True"):
        register_own_family()
    register_own_family(replace_existing=True)


def test_a_misspelt_keyword_of_a_family_is_refused(own_type):
    with pytest.raises(TypeError, match="unexpected keyword argument 'blok'"):
        register_own_family(blok="blocks.*")
