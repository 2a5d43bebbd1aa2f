"""What a run is: strict models checked before anything runs, canonical JSON, and an id that is a hash of it."""

from __future__ import annotations

import hashlib
import json
import re
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator, model_validator

from .errors import ConfigError, nearest
from .method import PRESETS, Method
from .schema import Strict, explain, merge

Positive = Annotated[int, Field(gt=0)]
Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]

# The study's names for a method: (model_type, freeze_qk, ortho_method) -> preset.
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


class ModelConfig(Strict, refusal=ConfigError):
    """The model: `gpt:SIZE` (tiny, small, medium-512, medium, large), a folder, a Hub name, or `random:FAMILY`.

    `fields` go into its config. With `from_scratch`, a folder or Hub name gives only the config.
    """

    name: str = "gpt:tiny"
    fields: dict[str, Any] = {}
    from_scratch: bool = False
    revision: str | None = None


class DataConfig(Strict, refusal=ConfigError):
    """The text: a folder that `oelm data prepare` wrote, or `builtin:stories`, which is synthetic.

    `fraction` keeps the first share of the training tokens. `seed` orders the windows; by default the run's seed does.
    """

    path: str = "builtin:stories"
    sequence_length: Positive = 512
    fraction: Annotated[float, Field(gt=0, le=1)] = 1.0
    seed: int | None = None


class OptimizerConfig(Strict, refusal=ConfigError):
    """AdamW, and how the learning rate moves: warm-up, then a cosine or a line down to `floor`, or constant.

    `layer_decay` multiplies the rate once more for every block below the last. `multipliers` are by role: q, k, v, o,
    ffn_in, ffn_out, core, embedding, norm, head.
    """

    learning_rate: Rate = 3e-4
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    warmup_steps: Annotated[int, Field(ge=0)] | None = None
    warmup_share: Share = 0.02
    floor: Share = 0.1
    weight_decay: Annotated[float, Field(ge=0)] = 0.1
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.95
    epsilon: Rate = 1e-8
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


ROLES = ("q", "k", "v", "o", "ffn_in", "ffn_out", "core", "embedding", "norm", "head")


class TrainConfig(Strict, refusal=ConfigError):
    """The loop: `batch_size` sequences per optimiser step over all devices, `micro_batch_size` at a time on each."""

    max_steps: Positive = 1000
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
    """Validation: how often, on how many sequences (none: all), and the perplexities whose first time is recorded."""

    every: Positive = 1000
    sequences: Positive | None = None
    batch_size: Positive | None = None
    targets: tuple[float, ...] = ()


class CheckpointConfig(Strict, refusal=ConfigError):
    """Checkpoints to resume from: how often, how many, and whether a run that finds one goes on.

    `resume`: "auto" goes on where the last one is, exactly or not at all; "inexact" also where the processes, the
    threads, the optimiser's kernel or torch differ; "never" refuses a folder that holds one.
    """

    every: Positive = 1000
    keep: Positive = 1
    best: bool = True
    resume: Literal["auto", "inexact", "never"] = "auto"


class LogConfig(Strict, refusal=ConfigError):
    """How often a line of metrics is written, where else it goes, and a note to keep with the result."""

    every: Positive = 10
    note: str | None = None
    trackers: tuple[Literal["tensorboard", "wandb", "mlflow", "trackio"], ...] = ()


class RunConfig(Strict, refusal=ConfigError):
    """One run, whole. Everything that may change a number in its result is in here, and in its id."""

    experiment: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")] = "run"
    seed: int = 0
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

    @model_validator(mode="after")
    def _batch_divides(self) -> RunConfig:
        micro, batch = self.train.micro_batch_size, self.train.batch_size
        if micro is not None and batch % micro:
            raise ValueError(f"train.batch_size {batch} is not a multiple of train.micro_batch_size {micro}")
        return self

    @classmethod
    def load(cls, source: str | PathLike[str] | dict[str, Any], overrides: list[str] | None = None) -> RunConfig:
        """A config from a YAML or JSON file or a dict, with `key=value` overrides such as `train.max_steps=100`."""
        fields = dict(source) if isinstance(source, dict) else read_mapping(source)
        for override in overrides or []:
            change = _parse_override(override)
            if isinstance(fields.get("method"), str) and isinstance(change.get("method"), dict):
                fields["method"] = {"preset": fields["method"]}  # method.layers=... changes the method that is named
            fields = merge(fields, change)
        where = "config" if isinstance(source, dict) else str(source)
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
        """A hash of all that may change a number: not where the run is kept, logged or how often it is saved."""
        apart = {"output", "log", "checkpoint"}
        content = json.dumps({k: v for k, v in self.to_dict().items() if k not in apart}, sort_keys=True)
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

    @property
    def warmup_steps(self) -> int:
        given = self.optimizer.warmup_steps
        return round(self.train.max_steps * self.optimizer.warmup_share) if given is None else given


def read_mapping(path: str | PathLike[str]) -> dict[str, Any]:
    """The mapping in a YAML or JSON file."""
    import yaml

    try:
        content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not YAML or JSON ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: a config is a mapping of keys to values")
    return content


def _parse_override(text: str) -> dict[str, Any]:
    import yaml

    key, found, value = text.partition("=")
    if not found or not key:
        raise ConfigError(f"{text!r}: an override is key=value, such as train.max_steps=100")
    try:
        parsed: Any = yaml.safe_load(value)
    except yaml.YAMLError:
        parsed = value
    if isinstance(parsed, str):
        parsed = _number(parsed)
    for part in reversed(key.split(".")):
        parsed = {part: parsed}
    assert isinstance(parsed, dict)
    return parsed


def _number(text: str) -> str | float:
    """YAML reads 3e-4 as a string; a learning rate is a number."""
    return float(text) if _SCIENTIFIC.fullmatch(text) else text


def _study_method(model_type: str = "oelm", freeze_qk: bool | None = None, ortho_method: str | None = None) -> Method:
    if model_type not in ("gpt", "oelm"):
        raise ValueError(f"model_type {model_type!r}: use 'gpt' or 'oelm' (any other model goes into model.name)")
    if model_type == "gpt":
        if freeze_qk or ortho_method is not None:
            raise ValueError("model_type 'gpt' is the plain model: it goes with neither freeze_qk nor ortho_method")
        return PRESETS["baseline"]
    if ortho_method is not None and ortho_method not in _ORTHO_METHODS:
        raise ValueError(f"ortho_method {ortho_method!r}: use one of {', '.join(_ORTHO_METHODS)}")
    frozen = PRESETS[_ORTHO_METHODS[ortho_method or "qr"]]
    if freeze_qk is False:
        thawed = {side: getattr(frozen, side).model_copy(update={"frozen": False}) for side in ("q", "k")}
        return frozen.model_copy(update=thawed)
    return frozen
