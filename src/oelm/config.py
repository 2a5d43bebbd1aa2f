"""The config of a run: strict models, checked before anything runs, and an id that is a hash of the settings."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from .base.strict import Fraction, Strict, ValidationShare, explain, merge
from .base.yaml_text import parse_yaml
from .errors import ConfigError, MethodError, nearest
from .method.spec import PRESETS, Method
from .method.study import study_method

# The upper bound is far above any real count; beyond it numpy and torch fail with unclear errors.
Positive = Annotated[int, Field(gt=0, le=10**15)]
# The seeds that both torch and numpy accept.
Seed = Annotated[int, Field(ge=0, lt=2**64)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]

# Prefixes of model names: the project's GPT in a size, and a small random model of a family.
GPT, RANDOM = "gpt:", "random:"
# Numbers that YAML 1.1 reads as strings. Others that Python could convert, such as "nan", stay strings.
_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")

Column = Annotated[str, Field(min_length=1)]
EPOCH: Literal["epoch"] = "epoch"
LANGUAGE = "language"
MASKED = "masked-language"
# Prefix of the names of tasks whose sequences are generated.
GENERATED = "generated:"
# Sections that may be given as a name alone, and the field that the name sets.
_BY_NAME = {"method": "preset", "task": "name"}
# Sections that change no number of a result: where a run is kept, and how it is logged and saved.
WITHOUT_EFFECT = ("output", "log", "checkpoint")


def expanded(path: str | None) -> str | None:
    """Return a path with a leading ~ written out as the user's home folder, as a shell does."""
    return os.path.expanduser(path) if path is not None and path.startswith("~") else path


class TaskConfig(Strict, refusal=ConfigError):
    """The task: `language`; `masked-language`, which fills gaps in running text; one with labelled examples: sst2,
    mnli, xnli, imdb, ag_news, folder, builtin:NAME; or generated:NAME, sequences that ask for one ability of attention,
    such as recall.

    form                how the model answers: `labels` by a classification head, `text` as text by an encoder-decoder
    text, pair, label   the columns of the user's own files
    source, target      the columns of text-to-text data
    languages           the languages that xnli is evaluated in
    validation_share    the share of the training examples held out if the task has no labelled validation split
    revision            the dataset's revision on the Hub
    mask_share          the share of each sequence's tokens that `masked-language` predicts
    mask_token_share    the share of these that the mask token replaces
    mask_random_share   the share of these that a random token replaces; the others stay
    """

    name: str = LANGUAGE
    form: Literal["labels", "text"] = "labels"
    text: Column | None = None
    pair: Column | None = None
    label: Column | None = None
    source: Column | None = None
    target: Column | None = None
    languages: tuple[Column, ...] = ("en",)
    validation_share: ValidationShare = 0.05
    revision: str | None = None
    mask_share: Fraction = 0.15
    mask_token_share: Share = 0.8
    mask_random_share: Share = 0.1

    @model_validator(mode="after")
    def _check_fields_together(self) -> TaskConfig:
        on_text = dict.fromkeys((LANGUAGE, MASKED), "learns from running text")
        source = {**on_text, "generated": "generates its sequences"}.get(self.kind)
        if source and self.form == "text":
            raise ValueError(f"form 'text' belongs to a task with examples; {self.name!r} {source}")
        if source and (self.text or self.pair or self.label):
            raise ValueError(f"text, pair and label name columns, and {self.name!r} {source}: set name too")
        if (self.source or self.target) and self.form == "labels":
            raise ValueError("source and target are the columns of text-to-text data: set form to 'text'")
        if (self.source is None) != (self.target is None):
            raise ValueError("source and target go together: name both columns")
        masks = [name for name in _MASKS if name in self.model_fields_set]
        if masks and self.kind != MASKED:
            raise ValueError(f"{masks[0]} is a setting of the task {MASKED!r}, not of {self.name!r}")
        if self.mask_token_share + self.mask_random_share > 1 + 1e-9:
            raise ValueError(
                f"mask_token_share {self.mask_token_share:g} and mask_random_share {self.mask_random_share:g} are more "
                "than 1 together, and so than all of the tokens that are predicted"
            )
        return self

    @model_serializer(mode="wrap")
    def _leave_out_masks(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leave out the settings of masks for other tasks: they change nothing there, so no id may depend on them."""
        fields: dict[str, Any] = handler(self)
        return fields if self.kind == MASKED else {name: fields[name] for name in fields if name not in _MASKS}

    @property
    def kind(self) -> Literal["language", "masked-language", "classification", "text2text", "generated"]:
        """Return the training objective that follows from the task's name and form."""
        if self.name == LANGUAGE:
            return "language"
        if self.name == MASKED:
            return "masked-language"
        if self.name.startswith(GENERATED):
            return "generated"
        return "text2text" if self.form == "text" else "classification"


_MASKS = ("mask_share", "mask_token_share", "mask_random_share")


class ModelConfig(Strict, refusal=ConfigError):
    """The model: `gpt:SIZE` or `gpt:modern-SIZE`, a folder, a Hub name, or `random:FAMILY`.

    SIZE            tiny, small, medium-512, medium or large
    fields          fields of the model's own config
    from_scratch    use only the config of a folder or Hub name, not its weights
    tokenizer       a folder or Hub name, to fine-tune a model without a tokenizer; runs on text use their data's
    """

    name: str = "gpt:tiny"
    fields: dict[str, Any] = {}
    from_scratch: bool = False
    revision: str | None = None
    tokenizer: str | None = None

    _expand = field_validator("name", "tokenizer")(expanded)

    @field_validator("fields")
    @classmethod
    def _check_fields(cls, value: dict[str, Any]) -> dict[str, Any]:
        """Refuse what no model has a use for: its own classes do not, and train something else."""
        for name, content in value.items():
            if name in ("dtype", "torch_dtype"):
                raise ValueError(f"{name}: weights are trained in float32; train.precision sets that of the products")
            if isinstance(content, float) and not math.isfinite(content):
                raise ValueError(f"{name} {content}: must be finite")
            ids = content if isinstance(content, list) else [content]
            if name.endswith("_token_id") and not all(one is None or type(one) is int for one in ids):
                raise ValueError(f"{name} {content!r}: must be the number of a token")
        return value


class DataConfig(Strict, refusal=ConfigError):
    """The training data: where it is, how it is cut, how much of it is used and in what order.

    path                for `language` and `masked-language` a folder that `oelm data prepare` wrote, or
                        `builtin:stories` (synthetic); for other tasks a folder of local files, instead of the Hub
    sequence_length     tokens per sequence of running text, or the length at which examples are cut
    fraction            the share of the training data to use, from its start
    seed                the seed of the data's order; by default the run's seed
    """

    path: str | None = None
    sequence_length: Positive = 512
    fraction: Fraction = 1.0
    seed: Seed | None = None

    _expand = field_validator("path")(expanded)


class OptimizerConfig(Strict, refusal=ConfigError):
    """The optimiser, and its learning rate: warm-up, then constant, or a cosine or linear decay to a share, `floor`.

    `name`: AdamW, or Muon for the matrices of the blocks and AdamW for all else, at one rate. `layer_decay` multiplies
    the rate once more for every block below the last. `multipliers` maps a role to a factor on the rate of its
    parameters: q, k, v, o; down (to a latent), channel_q, channel_k; ffn_in, ffn_out; core, adapter; convolution (its
    taps); embedding, norm (a latent's and those of queries and keys too), head.
    """

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: Above0 = 3e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    warmup_share: Share = 0.02
    floor: Share = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    epsilon: Above0 = 1e-8
    clip: Annotated[float, Field(ge=0)] = 1.0
    layer_decay: Annotated[float, Field(gt=0, le=1)] = 1.0
    multipliers: dict[str, Annotated[float, Field(ge=0)]] = {}

    @field_validator("multipliers")
    @classmethod
    def _check_roles(cls, value: dict[str, float]) -> dict[str, float]:
        for role in value:
            if role not in ROLES:
                raise ValueError(f"unknown role {role!r}.{nearest(role, ROLES)} Roles: {', '.join(ROLES)}")
        return value


# Roles of a block's matrices; Muon trains these.
MATRIX_ROLES = ("q", "k", "v", "o", "down", "channel_q", "channel_k", "ffn_in", "ffn_out")
ROLES = (*MATRIX_ROLES, "core", "adapter", "convolution", "embedding", "norm", "head")


class TrainConfig(Strict, refusal=ConfigError):
    """The loop: `batch_size` sequences per optimiser step over all devices, `micro_batch_size` at a time on each.

    The length of a run is given either in steps or in epochs. `graphs` records the kernels of a step once for each
    shape of batch, on one GPU, and then launches them together. Both it and `compile` are by default for batches of one
    shape; asked for with labelled batches, they pad these to a few widths.
    """

    max_steps: Positive | None = None
    epochs: Above0 | None = None
    batch_size: Positive = 16
    micro_batch_size: Positive | None = None
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: bool | Literal["auto"] = "auto"
    graphs: bool | Literal["auto"] = "auto"
    deterministic: bool | Literal["auto"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    skip_nonfinite: Annotated[int, Field(ge=0)] = 0
    gradient_checkpointing: bool = False


class EvalConfig(Strict, refusal=ConfigError):
    """Validation: how often, on how much data, and what is measured beside the loss.

    sequences       how many to validate on, by default all; fewer are the first windows of a token file, or labelled
                    examples selected by a hash of their content
    choose          the metric that selects the best model; by default accuracy for classification, else the loss
    targets         perplexities or accuracies; the result records when a run first reached each
    generations     how many answers a text-to-text task generates at each validation
    probe           how many sequences the attention's entropy is measured on; 0 turns the measurement off
    """

    every: Positive | Literal["epoch"] = 1000
    sequences: Positive | None = None
    batch_size: Positive | None = None
    choose: Literal["loss", "accuracy", "macro_f1", "matthews"] | None = None
    targets: tuple[Above0, ...] = ()
    generations: Annotated[int, Field(ge=0)] = 200
    probe: Annotated[int, Field(ge=0)] = 4


class CheckpointConfig(Strict, refusal=ConfigError):
    """Checkpoints to resume from: how often, how many are kept, and whether a run resumes from an existing one.

    `resume`: "auto" resumes from the last checkpoint, and a deterministic run (`train.deterministic`) only if it can do
    so exactly; "inexact" also if the processes, threads, GPU, optimiser kernel, torch or plugin differ; "never" refuses
    a folder that holds a checkpoint. `best` keeps the best model. `frozen`: "seeded" leaves out frozen matrices that
    follow from the seed alone; they are made again on resuming, and verified.
    """

    every: Positive | Literal["epoch"] = 1000
    keep: Positive = 1
    best: bool = True
    frozen: Literal["saved", "seeded"] = "saved"
    resume: Literal["auto", "inexact", "never"] = "auto"


class PlanMark(Strict, refusal=ConfigError):
    """The plan that a run was started for: the name of its file, and the hash of its confirmation part."""

    name: str
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class LogConfig(Strict, refusal=ConfigError):
    """How often a line of metrics is written, where else it goes, and a note to keep with the result.

    `plan` is set by `oelm matrix PLAN`, and kept in environment.json.
    """

    every: Positive = 10
    note: str | None = None
    plan: PlanMark | None = None
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()


# Defaults by kind of task. Fine-tuning has the original study's recipe, but one learning rate for all methods.
_FINE_TUNING: dict[str, Any] = {
    "optimizer": {
        "learning_rate": 2e-5,
        "schedule": "linear",
        "warmup_share": 0.1,
        "floor": 0.0,
        "weight_decay": 0.01,
        "beta2": 0.999,
    },
    "train": {"epochs": 3.0},
    "eval": {"every": EPOCH},
    "checkpoint": {"every": EPOCH},
    "log": {"every": 50},
}
# A model that learns most of these tasks in a minute or two on a CPU.
_GENERATED: dict[str, Any] = {
    "model": {
        "name": "gpt:modern-tiny",
        "fields": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2},
    },
    "data": {"sequence_length": 64},
    "optimizer": {"learning_rate": 3e-3},
    "train": {"max_steps": 2000, "batch_size": 64},
    "eval": {"every": 250},
}
_TEXT: dict[str, Any] = {"data": {"path": "builtin:stories"}, "train": {"max_steps": 1000}}
_DEFAULTS: dict[str, dict[str, Any]] = {
    "language": _TEXT,
    "masked-language": {**_TEXT, "model": {"name": "random:bert"}},
    "classification": _FINE_TUNING,
    "text2text": _FINE_TUNING,
    "generated": _GENERATED,
}


class RunConfig(Strict, refusal=ConfigError):
    """The config of a run: everything that may change a number in its result, and where and how the run is saved."""

    other_names = {
        "lr": "optimizer.learning_rate",
        "wd": "optimizer.weight_decay",
        "steps": "train.max_steps",
        "max_iters": "train.max_steps",
        "num_epochs": "train.epochs",
        "num_train_epochs": "train.epochs",
        "seq_len": "data.sequence_length",
        "block_size": "data.sequence_length",
        "max_length": "data.sequence_length",
        **{size: f"model.fields.{size}" for size in ("hidden_size", "num_hidden_layers", "num_attention_heads")},
    }

    experiment: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    seed: Seed = 0
    task: TaskConfig = TaskConfig()
    model: ModelConfig = ModelConfig()
    method: Method = PRESETS["baseline"]
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    log: LogConfig = LogConfig()
    output: str = "runs"

    _expand = field_validator("output")(expanded)

    @model_validator(mode="before")
    @classmethod
    def _complete(cls, value: Any) -> Any:
        """Load a method given by its name, and fill in the defaults of the task, which may be given as a name alone."""
        if not isinstance(value, dict):
            return value
        fields = _load_method({key: _as_mapping(part) for key, part in value.items()})
        if isinstance(fields.get("task"), str):
            fields["task"] = {"name": fields["task"]}
        defaults = dict(_DEFAULTS[_kind_of(fields.get("task"))])
        train, model, lengths = fields.get("train"), fields.get("model"), ("max_steps", "epochs")
        if isinstance(train, dict) and any(train.get(unit) is not None for unit in lengths):
            defaults["train"] = {key: value for key, value in defaults["train"].items() if key not in lengths}
        if isinstance(model, dict) and "name" in model:
            defaults.pop("model", None)  # the fields of a default are that model's
        return merge(defaults, fields)

    @model_validator(mode="after")
    def _check_fields_together(self) -> RunConfig:
        micro, batch = self.train.micro_batch_size, self.train.batch_size
        if micro is not None and batch % micro:
            raise ValueError(f"train.batch_size {batch} is not a multiple of train.micro_batch_size {micro}")
        if self.optimizer.name == "muon" and self.train.parallel == "fsdp":
            raise ValueError("optimizer.name 'muon' needs whole matrices: set train.parallel to 'ddp', not 'fsdp'")
        if (self.train.max_steps is None) == (self.train.epochs is None):
            raise ValueError("train.max_steps and train.epochs both give the run's length: set one of the two")
        if self.eval.choose not in (None, "loss") and self.task.kind != "classification":
            raise ValueError(
                f"eval.choose {self.eval.choose!r} is a metric of classification; the task {self.task.name!r} can only "
                "use 'loss'"
            )
        if self.eval.targets and self.task.kind == "text2text":
            raise ValueError("eval.targets are perplexities or accuracies; a text-to-text run has neither")
        return self

    @classmethod
    def load(cls, source: str | PathLike[str] | dict[str, Any], overrides: list[str] | None = None) -> RunConfig:
        """Load a config from a YAML or JSON file or a dict, with overrides such as `train.max_steps=100`.

        The config.json in a run's folder is such a file: its id and format are not settings.
        """
        fields = dict(source) if isinstance(source, dict) else read_mapping(source)
        if not isinstance(source, dict) and {"id", "format"} <= fields.keys():
            fields = {key: value for key, value in fields.items() if key not in ("id", "format")}
        for override in overrides or []:
            fields = set_field(fields, *parse_override(override))
        origin = "config" if isinstance(source, dict) else str(source)
        origin += f" with {' '.join(overrides)}" if overrides else ""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ConfigError(f"{origin}: {explain(error, cls)}") from None
        except MethodError as error:
            raise MethodError(str(error) if isinstance(source, dict) else f"{origin}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """Return all fields, defaults included, as values that JSON can hold."""
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """Return canonical JSON: two equal configs give the same bytes."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @property
    def id(self) -> str:
        """Return a hash of all settings that may change a number: where and how a run is saved or logged is left out.

        `checkpoint.best` is not part of it, though it decides whether other splits are evaluated at the best step or at
        the last: their figures record the step.
        """
        content = {key: value for key, value in self.to_dict().items() if key not in WITHOUT_EFFECT}
        if content["optimizer"]["name"] == "adamw":  # runs of the time when there was no other keep their ids
            del content["optimizer"]["name"]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def folder(self) -> Path:
        """Return the run's folder, `<output>/<experiment>/<method>/seed-<n>`."""
        name = self.method.name
        if name == "custom":
            name = f"custom-{hashlib.sha256(self.method.to_json().encode()).hexdigest()[:8]}"
        return Path(self.output) / self.experiment / name / f"seed-{self.seed}"

    @property
    def data_seed(self) -> int:
        """Return the seed of the data's order, by default the run's seed."""
        return self.seed if self.data.seed is None else self.data.seed


def _kind_of(task: Any) -> str:
    """Return the kind of a task section that is not validated yet; a malformed one is reported by the validation."""
    try:
        return TaskConfig.model_validate(task or {}).kind
    except ValidationError:
        return "language"


def _load_method(fields: dict[str, Any]) -> dict[str, Any]:
    """Return the fields with the method loaded from its name, its fields, or the original study's names for it."""
    names = ("model_type", "freeze_qk", "ortho_method", "freeze_ratio")
    study = {name: fields.pop(name) for name in names if name in fields}
    if "method" in fields:
        fields["method"] = Method.load(fields["method"])
    if study:
        meaning = study_method(**study)
        if fields.setdefault("method", meaning) != meaning:
            raise ValueError(
                f"{', '.join(f'{k}: {v}' for k, v in study.items())} means method {meaning.name!r}, "
                f"but method is {fields['method'].name!r}: give one of the two"
            )
    return fields


def _as_mapping(part: Any) -> Any:
    """Return a section that was given as an object as a mapping of the fields that were set; others as they are."""
    return part.model_dump(exclude_unset=True) if isinstance(part, Strict) and not isinstance(part, Method) else part


def read_mapping(path: str | PathLike[str]) -> dict[str, Any]:
    """Return the mapping in a YAML or JSON file."""
    try:
        content = parse_yaml(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not YAML or JSON ({error})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a config is a mapping of keys to values")
    return content


def parse_override(text: str) -> tuple[str, Any]:
    """Return the dotted key and the value of `key=value`."""
    key, sign, value = text.partition("=")
    if not sign or not key:
        raise ConfigError(f"{text!r}: an override is key=value, such as train.max_steps=100")
    try:
        return key, as_number(parse_yaml(value))
    except ValueError:
        return key, value


def set_field(fields: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """Return the fields with a dotted one set. A method or task given by its name is changed, not replaced."""
    section, _, inner = name.partition(".")
    old = fields.get(section)
    if inner and old is not None and not isinstance(old, dict):
        if isinstance(old, Strict):
            old_fields = old.model_dump(exclude_unset=True)
        elif isinstance(old, str) and section in _BY_NAME:
            old_fields = {_BY_NAME[section]: old}
        else:
            raise ConfigError(f"{name}: {section} is {old!r}, which has no fields to set")
        fields = {**fields, section: old_fields}
    change = value
    for part in reversed(name.split(".")):
        change = {part: change}
    return merge(fields, change)


def as_number(value: Any) -> Any:
    """Return a string such as 3e-4, which YAML does not read as a number, as a float; anything else as it is."""
    return float(value) if isinstance(value, str) and _SCIENTIFIC.fullmatch(value) else value
