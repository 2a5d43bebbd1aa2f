"""Models and folders that are not what was sealed: `verify` and `load` refuse each, and never in another way."""

import copy
import json
import random
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils import parametrizations, parametrize

import oelm
from oelm.errors import OelmError
from oelm.method.record import record_hash
from oelm.method.sites import find_sites
from tests.support.damage import VALUES, mutated_record, places_in
from tests.support.models import freeze_error, lively_model, model_with_method

SEALED = [
    *(("bert", "oelm-freeze"), ("gpt2", "oelm-exact"), ("phi3", "oelm-nofreeze"), ("llama", "identity-core")),
    *(("bert", "head-only"), ("bert", "bitfit"), ("oelm-gpt", "identity-key"), ("t5", "oelm-qk-ffn")),
    *(("bert", {"preset": "oelm-qk-ffn", "freeze_ratio": 0.3}), ("gpt2", "lora")),
]
_models: dict[str, nn.Module] = {}


def sealed(name: str, method: Any) -> nn.Module:
    """Return a copy of a model with a method, which is made once."""
    key = f"{name} {method}"
    if key not in _models:
        if method == "lora":
            pytest.importorskip("peft")
        _models[key] = model_with_method(name, method)
    return copy.deepcopy(_models[key])


# A part of the model that the record does not declare, or that is not there


def _untie_the_head(model, randomness):
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def _add_a_delta(model, randomness):
    module = randomness.choice([module for module in model.modules() if "delta" not in module._parameters])
    module.delta = nn.Parameter(torch.zeros(3), requires_grad=randomness.random() < 0.5)


def _add_a_tensor_that_is_no_parameter(model, randomness):
    module, tensor = randomness.choice(list(model.modules())), torch.zeros(3, requires_grad=True)
    if randomness.random() < 0.5:
        module.delta = tensor
    else:
        module.register_buffer("delta", tensor)


def _wrap_a_module(model, randomness):
    # The weight of a tied head is the embedding's, under whose name it stays, and a wrapper changes no output.
    tied = model.get_input_embeddings().weight
    linear = [(p, m) for p, m in model.named_modules() if isinstance(m, nn.Linear) and m.weight is not tied]
    path, module = randomness.choice(linear)
    model.set_submodule(path, nn.Sequential(module))


def _parametrise(model, randomness):
    parametrizations.weight_norm(randomness.choice([m for m in model.modules() if isinstance(m, nn.Linear)]))


def _add_a_trained_parametrisation(model, randomness):
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(()))

        def forward(self, weight):
            return weight + self.shift

    module = randomness.choice([module for module in model.modules() if isinstance(module, nn.Linear)])
    parametrize.register_parametrization(module, "weight", Shifted(), unsafe=True)


def _remove_a_parameter(model, randomness):
    module = randomness.choice([m for m in model.modules() if any(p is not None for p in m._parameters.values())])
    name = randomness.choice([name for name, parameter in module._parameters.items() if parameter is not None])
    owners = [m for m in model.modules() if m._parameters.get(name) is module._parameters[name]]
    for owner in owners:  # a tied weight has several
        owner._parameters[name] = None


def _tie_two_weights(model, randomness):
    first, second = randomness.sample([m for m in model.modules() if isinstance(m, nn.LayerNorm)], 2)
    first.weight = second.weight


def _move_a_parameter_to_meta(model, randomness):
    module = randomness.choice([m for m in model.modules() if isinstance(m, nn.Linear)])
    module.weight = nn.Parameter(module.weight.to("meta"), module.weight.requires_grad)


def _flip_a_bit(model, randomness):
    named = dict(model.named_parameters())
    tensor = named[randomness.choice([name for name, parameter in named.items() if not parameter.requires_grad])]
    with torch.no_grad():
        words = tensor.view(-1).view(torch.int32)
        words[randomness.randrange(words.numel())] ^= 1 << randomness.randrange(31)


def _train_a_frozen_one(model, randomness):
    randomness.choice([p for p in model.parameters() if not p.requires_grad]).requires_grad_(True)


CHANGES = {
    _untie_the_head: lambda model: getattr(model.config, "tie_word_embeddings", False) and hasattr(model, "lm_head"),
    _add_a_delta: None,
    _add_a_tensor_that_is_no_parameter: None,
    _wrap_a_module: None,
    _parametrise: None,
    _add_a_trained_parametrisation: None,
    _remove_a_parameter: None,
    _tie_two_weights: lambda model: sum(isinstance(module, nn.LayerNorm) for module in model.modules()) > 1,
    _move_a_parameter_to_meta: None,
    _flip_a_bit: lambda model: any(not parameter.requires_grad for parameter in model.parameters()),
    _train_a_frozen_one: lambda model: any(not parameter.requires_grad for parameter in model.parameters()),
}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__.strip("_"))
def test_a_model_that_is_not_the_sealed_one_is_refused(change, rounds):
    randomness, outcomes = random.Random(change.__name__), Counter()
    for number in range(rounds(len(SEALED))):
        name, method = SEALED[number % len(SEALED)]
        model = sealed(name, method)
        if CHANGES[change] and not CHANGES[change](model):
            continue
        change(model, randomness)
        assert "is not frozen as sealed" in freeze_error(model), f"{name} {method}"
        outcomes["refused"] += 1
    assert outcomes["refused"]
    print(f"{change.__name__.strip('_')}: {dict(outcomes)}")


@pytest.mark.parametrize(("name", "method"), SEALED, ids=lambda value: str(value))
def test_the_sealed_model_passes_with_what_may_be_done_to_it(name, method):
    """Saving and loading, no gradients, a cast, a wrapper, an adapter of peft's: none of it is an alarm."""
    model = sealed(name, method)
    oelm.verify(model)
    oelm.verify(copy.deepcopy(model).bfloat16())
    oelm.verify(torch.compile(copy.deepcopy(model)))
    part = copy.deepcopy(model)
    path = find_sites(part)[1][0].roles["o"]
    part.set_submodule(path, torch.compile(part.get_submodule(path)))
    oelm.verify(part)
    peft = pytest.importorskip("peft")
    if method != "lora":
        targets = [find_sites(model)[1][0].roles["o"]]
        with_adapter = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(target_modules=targets, r=2))
        assert "peft added 2 tensors" in str(oelm.verify(with_adapter))
    oelm.verify(model.requires_grad_(False))


def test_a_parametrisation_that_was_there_is_declared(tmp_path):
    model = lively_model("bert")
    parametrizations.weight_norm(model.bert.encoder.layer[0].attention.self.value)
    oelm.apply(model, "oelm-freeze")
    oelm.verify(model)


@pytest.mark.parametrize(("name", "preset"), [("gpt2", "oelm-nofreeze"), ("phi3", "random-nofreeze")])
def test_a_folder_that_was_loaded_plainly_with_random_matrices_is_refused(name, preset, tmp_path):
    model = model_with_method(name, preset)
    model.save_pretrained(tmp_path)
    plain = type(model).from_pretrained(tmp_path, ignore_mismatched_sizes=True)
    assert "load its folder with oelm.load" in freeze_error(plain)


@pytest.mark.parametrize("narrow", [("bfloat16", "float16"), ("float16", "bfloat16")])
def test_a_second_narrow_cast_is_recognised_or_named(narrow):
    model = lively_model("bert", hidden_size=192, num_hidden_layers=2)  # wide enough to have very small entries
    oelm.apply(model, "oelm-freeze")
    for dtype in narrow:
        model.to(getattr(torch, dtype))
    assert "it was cast to float16 and bfloat16" in freeze_error(model)
    with torch.no_grad():  # without the small entries nothing is lost by the second cast
        small = lively_model("bert", num_hidden_layers=1)
        for parameter in small.parameters():
            parameter.copy_((torch.arange(parameter.numel()) % 97 + 1).view_as(parameter) / 8 + 1e-3)
    oelm.apply(small, "freeze-pretrained")
    if narrow[0] == "bfloat16":
        casts = oelm.verify(small.bfloat16().half()).casts
        assert list(casts) == ["bfloat16 and then float16"]


# The record


@pytest.mark.parametrize("renewed", [False, True], ids=["its hash as it was", "its hash renewed"])
def test_a_changed_record_is_refused(renewed, rounds):
    """Whoever renews the record's own hash can still write another method, where the model is the same with it."""
    randomness, outcomes = random.Random(f"records {renewed}"), Counter()
    for number in range(rounds(40)):
        name, method = SEALED[number % len(SEALED)]
        model = sealed(name, method)
        model.config.oelm, place = mutated_record(model.config.oelm, randomness)
        if renewed:
            model.config.oelm["sha256"] = record_hash(model.config.oelm)
        try:
            oelm.verify(model)
        except oelm.FreezeError:
            outcomes["refused"] += 1
            continue
        assert renewed, f"{name} {method}: {place} made no difference"
        assert place.startswith(("seed", "method.", "sha256")), f"{name} {method}: {place} made no difference"
        outcomes["another method or seed"] += 1
    print(f"records, {'renewed' if renewed else 'damaged'}: {dict(outcomes)}")


@pytest.mark.parametrize(
    ("field", "message"),
    [("orthonormal_blocks", f"48 rows cannot be cut into {10**40} heads"), ("factor", "lost its orthogonality")],
)
def test_numbers_that_are_too_large_are_a_changed_record(field, message):
    model = sealed("bert", "oelm-freeze")
    path = next(iter(model.config.oelm["matrices"]))
    model.config.oelm["matrices"][path][field] = 10**40
    model.config.oelm["sha256"] = record_hash(model.config.oelm)
    assert f"{path}{':' if field != 'factor' else ''} {message}" in freeze_error(model)


def test_a_parameter_that_the_record_forgets_is_missed():
    """Its matrix still names it."""
    model = sealed("phi3", "oelm-nofreeze")
    name = next(iter(model.config.oelm["matrices"].values()))["tensors"][0]
    model.config.oelm["parameters"].remove(name)
    model.config.oelm["sha256"] = record_hash(model.config.oelm)
    assert f"the record says of {name} neither that it is frozen nor that it trains" in freeze_error(model)


@pytest.mark.parametrize(
    "keys", [["matrices"], ["frozen"], ["matrices", "frozen"], ["matrices", "frozen", "parameters"]]
)
@pytest.mark.parametrize(("name", "method"), SEALED, ids=lambda value: str(value))
def test_an_emptied_record_is_refused(name, method, keys):
    model = sealed(name, method)
    if not any(model.config.oelm[key] for key in keys):
        pytest.skip("nothing to empty")
    for key in keys:
        model.config.oelm[key] = type(model.config.oelm[key])()
    freeze_error(model)


# The folder


@pytest.fixture
def folder(tmp_path) -> Path:
    model_with_method("gpt2", "oelm-exact").save_pretrained(tmp_path / "model", max_shard_size="40KB")
    return tmp_path / "model"


@pytest.mark.parametrize(
    "target", ["../other.safetensors", "ABSOLUTE", "weights.bin", "", ".", "a/b.safetensors", 3, None]
)
def test_an_index_that_leads_out_of_the_folder_is_refused(target, folder):
    index = folder / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    shard = sorted(set(content["weight_map"].values()))[0]
    shutil.copy(folder / shard, folder.parent / "other.safetensors")
    torch.save(load_file(folder / shard), folder / "weights.bin")
    (folder / "a").mkdir()
    shutil.copy(folder / shard, folder / "a/b.safetensors")
    target = str(folder.parent / "other.safetensors") if target == "ABSOLUTE" else target
    content["weight_map"] = {name: target if file == shard else file for name, file in content["weight_map"].items()}
    index.write_text(json.dumps(content))
    with pytest.raises(oelm.CheckpointError, match=r"index\.json: (names|is damaged)"):
        oelm.load(folder)


def test_a_stray_adapter_is_refused(folder):
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "base_model_name_or_path": "other"}))
    with pytest.raises(oelm.CheckpointError, match=r"adapter_config\.json beside a whole model"):
        oelm.load(folder)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"transformers_weights": "other.safetensors"}, "transformers_weights"),
        ({"attn_implementation": "someone/kernel"}, "attention code"),
        ({"num_hidden_layers": 100_000_000, "n_layer": 100_000_000}, "of memory"),
        ({"n_embd": 100_000_000}, "of memory"),
        ({"n_positions": 10**13}, "of memory"),
        ({"vocab_size": 10**13}, "of memory"),
    ],
)
def test_a_config_that_leads_elsewhere_or_fills_the_memory_is_refused(fields, message, folder):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    with pytest.raises(OelmError, match=message):
        oelm.load(folder)


def test_a_subclass_with_a_trained_delta_is_refused(tmp_path):
    model = sealed("bert", "oelm-freeze")
    model.save_pretrained(tmp_path)

    class WithDelta(type(model)):
        def __init__(self, config):
            super().__init__(config)
            self.delta = nn.Parameter(torch.zeros(48))

    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, "delta": torch.ones(48)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(oelm.FreezeError, match="delta is not in the record, and it trains"):
        oelm.load(tmp_path, model_class=WithDelta)


def test_damaged_configs_and_indexes_end_in_one_error_of_oelms(folder, rounds, tmp_path):
    randomness, outcomes = random.Random("folders"), Counter()
    whole = {name: (folder / name).read_text() for name in ("config.json", "model.safetensors.index.json")}
    for number in range(rounds(30)):
        name = list(whole)[number % 3 == 0]
        content = json.loads(whole[name])
        places = [place for place in places_in(content) if place[0] != "oelm"]  # those are attacked above
        *above, last = randomness.choice(places)
        node = content
        for key in above:
            node = node[key]
        if randomness.random() < 0.3:
            del node[last]
        else:
            node[last] = randomness.choice(VALUES)
        text = json.dumps(content)
        (folder / name).write_text(text[: randomness.randrange(len(text))] if randomness.random() < 0.1 else text)
        problem = None
        try:
            oelm.verify(oelm.load(folder))
        except OelmError as error:
            problem = str(error)
        assert problem is None or str(folder) in problem, f"{'.'.join(map(str, (*above, last)))}: {problem}"
        outcomes["loaded" if problem is None else "refused"] += 1
        (folder / name).write_text(whole[name])
    print(f"folders: {dict(outcomes)}")
