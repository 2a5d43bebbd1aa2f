"""What a run is: strict models checked before anything runs, canonical JSON, and an id that is a hash of it."""

from __future__ import annotations

import hashlib
import json
import re
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from .base.files import parse_yaml
from .base.strict import Fraction, Strict, ValidationShare, explain, merge
from .errors import ConfigError, nearest
from .method.spec import PRESETS, Method

# No count comes near the upper bound; beyond it numpy and torch fail in words of their own.
Positive = Annotated[int, Field(gt=0, le=10**15)]
# What torch and numpy take for a seed.
Seed = Annotated[int, Field(ge=0, lt=2**64)]
Above0 = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]

# How the names of models begin that are made here: our GPT in a size, and a small random one of a family.
GPT, RANDOM = "gpt:", "random:"
# The study's ortho_method -> the preset that it means with model_type 'oelm', frozen.
_ORTHO_METHODS = {
    "qr": "oelm-freeze",
    "orthogonal": "oelm-freeze",
    "headwise": "oelm-freeze",
    "global": "oelm-global",
    "normal": "oelm-random",
    "random": "oelm-random",
}


# The numbers that YAML 1.1 takes for words. Others that Python would read, such as "nan", are meant as words.
_SCIENTIFIC = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")


Column = Annotated[str, Field(min_length=1)]
EPOCH: Literal["epoch"] = "epoch"
LANGUAGE = "language"
# Sections that may be given by a name alone, and the field that it stands for.
_BY_NAME = {"method": "preset", "task": "name"}
# Sections that change no number of a result: where a run is kept, logged and saved.
WITHOUT_EFFECT = ("output", "log", "checkpoint")


class TaskConfig(Strict, refusal=ConfigError):
    """What is learned: `language`, or a task with examples: sst2, mnli, xnli, imdb, ag_news, folder, builtin:NAME.

    `form` says how a task's answer is given: by a classification head, or written out as text by an encoder-decoder.
    `text`, `pair` and `label` name the columns of the user's own files, `source` and `target` those of text-to-text
    data. `languages` are those that xnli is evaluated in. `validation_share` is cut off the training examples where a
    task has no labelled validation split. `revision` is the dataset's on the Hub.
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

    @model_validator(mode="after")
    def _is_coherent(self) -> TaskConfig:
        if self.name == LANGUAGE and self.form == "text":
            raise ValueError("form 'text' belongs to a task with examples; 'language' learns from running text")
        if self.name == LANGUAGE and (self.text or self.pair or self.label):
            raise ValueError("text, pair and label name columns, and 'language' learns from running text: set name too")
        if (self.source or self.target) and self.form == "labels":
            raise ValueError("source and target are the columns of text-to-text data: set form to 'text'")
        if (self.source is None) != (self.target is None):
            raise ValueError("source and target go together: name both columns")
        return self

    @property
    def kind(self) -> Literal["language", "classification", "text2text"]:
        if self.name == LANGUAGE:
            return "language"
        return "text2text" if self.form == "text" else "classification"


class ModelConfig(Strict, refusal=ConfigError):
    """The model: `gpt:SIZE` (tiny, small, medium-512, medium, large), a folder, a Hub name, or `random:FAMILY`.

    `fields` go into its config. With `from_scratch`, a folder or Hub name gives only the config. `tokenizer` is a
    folder or Hub name, for fine-tuning a model that does not bring its own; language models take their data's.
    """

    name: str = "gpt:tiny"
    fields: dict[str, Any] = {}
    from_scratch: bool = False
    revision: str | None = None
    tokenizer: str | None = None


class DataConfig(Strict, refusal=ConfigError):
    """The text: for `language` a folder that `oelm data prepare` wrote, or `builtin:stories`, which is synthetic.

    For other tasks `path` is a folder of local files that stands in for the Hub. Sequences are `sequence_length` long
    (`language`), or cut at that. `fraction` keeps the first share of the training data. `seed` orders it; by default
    the run's seed does.
    """

    path: str | None = None
    sequence_length: Positive = 512
    fraction: Fraction = 1.0
    seed: Seed | None = None


class OptimizerConfig(Strict, refusal=ConfigError):
    """AdamW, and how the learning rate moves: warm-up, then a cosine or a line down to `floor`, or constant.

    `layer_decay` multiplies the rate once more for every block below the last. `multipliers` are by role: q, k, v, o,
    ffn_in, ffn_out, core, adapter, embedding, norm, head.
    """

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
    def _known_roles(cls, value: dict[str, float]) -> dict[str, float]:
        for role in value:
            if role not in ROLES:
                raise ValueError(f"unknown role {role!r}.{nearest(role, ROLES)} Roles: {', '.join(ROLES)}")
        return value


ROLES = ("q", "k", "v", "o", "ffn_in", "ffn_out", "core", "adapter", "embedding", "norm", "head")


class TrainConfig(Strict, refusal=ConfigError):
    """The loop: `batch_size` sequences per optimiser step over all devices, `micro_batch_size` at a time on each.

    A run's length is given in steps or in epochs.
    """

    max_steps: Positive | None = None
    epochs: Above0 | None = None
    batch_size: Positive = 16
    micro_batch_size: Positive | None = None
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: bool | Literal["auto"] = "auto"
    deterministic: bool | Literal["auto"] = "auto"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    parallel: Literal["ddp", "fsdp"] = "ddp"
    skip_nonfinite: Annotated[int, Field(ge=0)] = 0
    gradient_checkpointing: bool = False


class EvalConfig(Strict, refusal=ConfigError):
    """Validation: how often, on how many sequences (none: all), and what is measured beside the loss.

    Fewer than all are the first windows of a token file; of labelled examples those that their content chooses.
    `choose` is the figure that tells the best model; by default accuracy for classification, else the loss. `targets`
    are perplexities, or accuracies, whose first time is recorded. `generations` is how many answers of a text-to-text
    task are written out. `probe` is how many sequences the attention's entropy is measured on; 0 turns that off.
    """

    every: Positive | Literal["epoch"] = 1000
    sequences: Positive | None = None
    batch_size: Positive | None = None
    choose: Literal["loss", "accuracy", "macro_f1", "matthews"] | None = None
    targets: tuple[Above0, ...] = ()
    generations: Annotated[int, Field(ge=0)] = 200
    probe: Annotated[int, Field(ge=0)] = 4


class CheckpointConfig(Strict, refusal=ConfigError):
    """Checkpoints to resume from: how often, how many, and whether a run that finds one goes on.

    `resume`: "auto" goes on where the last one is, and where the run is deterministic (`train.deterministic`) exactly
    or not at all; "inexact" also where the processes, the threads, the GPU, the optimiser's kernel or torch differ;
    "never" refuses a folder that holds one.
    """

    every: Positive | Literal["epoch"] = 1000
    keep: Positive = 1
    best: bool = True
    resume: Literal["auto", "inexact", "never"] = "auto"


class LogConfig(Strict, refusal=ConfigError):
    """How often a line of metrics is written, where else it goes, and a note to keep with the result."""

    every: Positive = 10
    note: str | None = None
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()


# What a run is unless told otherwise, by what it learns. Fine-tuning has the study's recipe, at one rate for all arms.
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
_DEFAULTS: dict[str, dict[str, Any]] = {
    "language": {"data": {"path": "builtin:stories"}, "train": {"max_steps": 1000}},
    "classification": _FINE_TUNING,
    "text2text": _FINE_TUNING,
}


class RunConfig(Strict, refusal=ConfigError):
    """One run, whole. Everything that may change a number in its result is in here, and in its id."""

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

    @model_validator(mode="before")
    @classmethod
    def _names_of_the_study(cls, value: Any) -> Any:
        """Read `model_type: gpt|oelm` with `freeze_qk` and `ortho_method` as a method, and a method by its name."""
        if not isinstance(value, dict):
            return value
        fields = dict(value)
        aliases = {name: fields.pop(name) for name in ("model_type", "freeze_qk", "ortho_method") if name in fields}
        if "method" in fields:
            fields["method"] = Method.load(fields["method"])
        if aliases:
            named = _study_method(**aliases)
            if "method" in fields and fields["method"] != named:
                raise ValueError(
                    f"{', '.join(f'{k}: {v}' for k, v in aliases.items())} means method {named.name!r}, "
                    f"but method is {fields['method'].name!r}: give one of the two"
                )
            fields["method"] = named
        return fields

    @model_validator(mode="before")
    @classmethod
    def _defaults_of_the_task(cls, value: Any) -> Any:
        """Fill in what the task implies; a task by its name alone is one."""
        if not isinstance(value, dict):
            return value
        fields = {key: _as_given(part) for key, part in value.items()}
        if isinstance(fields.get("task"), str):
            fields["task"] = {"name": fields["task"]}
        defaults = dict(_DEFAULTS[_kind_of(fields.get("task"))])
        length = fields.get("train")
        if isinstance(length, dict) and any(length.get(unit) is not None for unit in ("max_steps", "epochs")):
            defaults.pop("train")
        return merge(defaults, fields)

    @model_validator(mode="after")
    def _is_coherent(self) -> RunConfig:
        micro, batch = self.train.micro_batch_size, self.train.batch_size
        if micro is not None and batch % micro:
            raise ValueError(f"train.batch_size {batch} is not a multiple of train.micro_batch_size {micro}")
        if (self.train.max_steps is None) == (self.train.epochs is None):
            raise ValueError("train.max_steps and train.epochs both give the run's length: set one of the two")
        if self.eval.choose not in (None, "loss") and self.task.kind != "classification":
            raise ValueError(f"eval.choose {self.eval.choose!r} is a figure of classification, not of {self.task.name}")
        if self.eval.targets and self.task.kind == "text2text":
            raise ValueError("eval.targets are perplexities or accuracies; a text-to-text run has neither")
        return self

    @classmethod
    def load(cls, source: str | PathLike[str] | dict[str, Any], overrides: list[str] | None = None) -> RunConfig:
        """A config from a YAML or JSON file or a dict, with `key=value` overrides such as `train.max_steps=100`."""
        fields = dict(source) if isinstance(source, dict) else read_mapping(source)
        for override in overrides or []:
            fields = set_field(fields, *parse_override(override))
        where = "config" if isinstance(source, dict) else str(source)
        where += f" with {' '.join(overrides)}" if overrides else ""
        try:
            return cls.model_validate(fields)
        except ValidationError as error:
            raise ConfigError(f"{where}: {explain(error, cls)}") from None

    def to_dict(self) -> dict[str, Any]:
        return self.model_dump(mode="json")

    def to_json(self) -> str:
        """Canonical JSON: two equal configs give the same bytes."""
        return json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":"))

    @property
    def id(self) -> str:
        """A hash of all that may change a number: not where the run is kept, logged or how often it is saved.

        With checkpoint.best other splits are evaluated at the best step, without it at the last: those figures say.
        """
        content = json.dumps({k: v for k, v in self.to_dict().items() if k not in WITHOUT_EFFECT}, sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:16]

    @property
    def folder(self) -> Path:
        """`<output>/<experiment>/<method>/seed-<n>`."""
        name = self.method.name
        if name == "custom":
            name = f"custom-{hashlib.sha256(self.method.to_json().encode()).hexdigest()[:8]}"
        return Path(self.output) / self.experiment / name / f"seed-{self.seed}"

    @property
    def data_seed(self) -> int:
        return self.seed if self.data.seed is None else self.data.seed


def _kind_of(task: Any) -> str:
    """The kind of a task that is still to be validated; one that is malformed gets its error with the other fields."""
    try:
        return TaskConfig.model_validate(task or {}).kind
    except ValidationError:
        return "language"


def _as_given(part: Any) -> Any:
    """A section as a mapping of what was set in it, whether it came as a mapping or as a section's object."""
    return part.model_dump(exclude_unset=True) if isinstance(part, Strict) and not isinstance(part, Method) else part


def read_mapping(path: str | PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML or JSON file."""
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
    """The dotted key and the value of `key=value`."""
    key, found, value = text.partition("=")
    if not found or not key:
        raise ConfigError(f"{text!r}: an override is key=value, such as train.max_steps=100")
    try:
        return key, as_number(parse_yaml(value))
    except ValueError:
        return key, value


def set_field(fields: dict[str, Any], name: str, value: Any) -> dict[str, Any]:
    """The fields with a dotted one set. A method or a task that is given by its name is changed, not replaced."""
    section, _, inner = name.partition(".")
    there = fields.get(section)
    if inner and there is not None and not isinstance(there, dict):
        if isinstance(there, Strict):
            given = there.model_dump(exclude_unset=True)
        elif isinstance(there, str) and section in _BY_NAME:
            given = {_BY_NAME[section]: there}
        else:
            raise ConfigError(f"{name}: {section} is {there!r}, which has no fields to set")
        fields = {**fields, section: given}
    change = value
    for part in reversed(name.split(".")):
        change = {part: change}
    return merge(fields, change)


def as_number(value: Any) -> Any:
    """YAML reads 3e-4 as a string; a learning rate is a number. Anything else stays what it is."""
    return float(value) if isinstance(value, str) and _SCIENTIFIC.fullmatch(value) else value


def _study_method(model_type: Any = "oelm", freeze_qk: Any = None, ortho_method: Any = None) -> Method:
    """The method that the study's names mean, as they stand in a file: of any type."""
    if model_type not in ("gpt", "oelm"):
        raise ValueError(f"model_type {model_type!r}: use 'gpt' or 'oelm' (any other model goes into model.name)")
    if not isinstance(freeze_qk, bool | None):
        raise ValueError(f"freeze_qk {freeze_qk!r}: use true or false")
    if model_type == "gpt":
        if freeze_qk or ortho_method is not None:
            raise ValueError("model_type 'gpt' is the plain model: not allowed with freeze_qk or ortho_method")
        return PRESETS["baseline"]
    if ortho_method is not None and ortho_method not in list(_ORTHO_METHODS):
        raise ValueError(f"ortho_method {ortho_method!r}: use one of {', '.join(_ORTHO_METHODS)}")
    frozen = PRESETS[_ORTHO_METHODS[ortho_method or "qr"]]
    if freeze_qk is False:
        thawed = {side: getattr(frozen, side).model_copy(update={"frozen": False}) for side in ("q", "k")}
        return frozen.model_copy(update=thawed)
    return frozen
