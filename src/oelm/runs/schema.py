"""The records of a run as types: what training writes, and what analysis, the lab and the report read.

config.json       RecordedConfig   the config and its id       metrics.jsonl   MetricLine   one line each
environment.json  Environment      versions, hardware, data    timing.json     Timing       step times
audit.json        Audit            what was frozen             result.json     Result       the figures, at the end
status.json       Status           state and latest figures, rewritten while the run is running
downstream.json   Downstream       scores on tasks of lm-eval, measured after the run (oelm eval --tasks)

All JSON files of a run carry FORMAT. `read` is the one place where a record's format and fields are checked: a file
that is damaged or of another format raises a FileError that names it, so that a reader can leave out that run alone.
Fields that are not listed here are kept as they are: a later version may add some without changing the format.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    ValidationError,
    model_serializer,
    model_validator,
)

from ..base.files import read_record, write_json
from ..base.strict import explain
from ..config import RunConfig
from ..errors import FileError, FormatError, OelmError

# Increase this whenever a record changes in a way that an older or a newer version of oelm would misread.
FORMAT = 2

Kind = Literal["language", "masked-language", "classification", "text2text", "generated"]
# States of a run. "stopped" is a run that was asked to stop and can be resumed; "failed" has a message that says why.
State = Literal["running", "finished", "stopped", "failed"]


class RecordPart(BaseModel):
    """A part of a record. A number that was not finite is null in JSON, and None here."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)


class Record(RecordPart):
    """The content of one JSON file of a run."""

    format: int = FORMAT

    def write(self, path: Path) -> None:
        """Write the record to a file, atomically."""
        write_json(path, {"format": self.format, **self.model_dump(exclude_unset=True)})


class RecordedConfig(Record):
    """A run's config with the id that it had when the run was trained; the file holds the config's fields beside it."""

    id: str
    config: RunConfig

    @model_validator(mode="before")
    @classmethod
    def _gather(cls, value: Any) -> Any:
        """Gather the config's fields, which the file holds at its top level, into `config`."""
        if not isinstance(value, dict) or "config" in value:
            return value
        fields = dict(value)
        header = {key: fields.pop(key) for key in ("format", "id") if key in value}
        return {**header, "config": RunConfig.load(fields)}

    @model_serializer(mode="wrap")
    def _spread(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {"format": self.format, "id": self.id, **self.config.to_dict()}


class Versions(RecordPart):
    """Versions of the packages that a result may depend on."""

    oelm: str
    python: str
    torch: str
    transformers: str
    tokenizers: str
    numpy: str


class Cpu(RecordPart):
    """The processor that a run was on."""

    count: int | None
    machine: str
    threads: int


class Gpu(RecordPart):
    """The GPU that a run was on."""

    name: str
    memory: int
    cuda: str | None


class SplitRecord(RecordPart):
    """One split of the data: its size and the hash of its content, where the task records them."""

    sha256: str | None = None
    tokens: int | None = None
    documents: int | None = None
    examples: int | None = None
    per_class: list[int] | None = None


class DataSummary(RecordPart):
    """What result.json says about the data."""

    description: str
    synthetic: bool


class DataRecord(DataSummary):
    """The data of a run, with the hashes of its tokenizer: of the vocabulary, and of its special tokens (`marks`)."""

    splits: dict[str, SplitRecord]
    vocab_size: int | None = None
    tokenizer: str | None = None
    marks: str | None = None
    labels: list[str] | None = None
    longest: int | None = None
    pairs: bool | None = None


class PluginRecord(RecordPart):
    """The user's own code that a run was made with: its file's name and the hash of its content."""

    name: str
    sha256: str


class PlanRecord(RecordPart):
    """The plan that a run was started for: its file's name and the hash of its confirmation part."""

    name: str
    sha256: str


class Environment(Record):
    """environment.json: what a result depends on beside its config, and the plan that the run was started for."""

    versions: Versions
    git_commit: str | None = None
    system: str
    cpu: Cpu
    gpu: Gpu | None = None
    device: str
    world_size: int
    data: DataRecord
    plugin: PluginRecord | None = None
    plan: PlanRecord | None = None

    @property
    def hardware(self) -> str:
        """Return the GPU's name, or the device where there is none."""
        return self.gpu.name if self.gpu is not None else self.device


class AuditRow(RecordPart):
    """One matrix of one block, as FreezeReport counts it."""

    kind: str
    layer: str
    role: str
    path: str
    init: str
    shape: list[int]
    frozen: int
    trainable: int
    orthogonality_error: float | None = None
    sha256: str | None = None


class Parameters(RecordPart):
    """How many parameters the model has, as the audit counts them."""

    total: int
    trainable: int
    frozen: int
    frozen_share: float
    buffers: int


class Audit(Record, Parameters):
    """audit.json: the FreezeReport of the run's model."""

    model: str
    method: str
    seed: int | None = None
    rows: list[AuditRow]
    frozen_share_of_blocks: float
    blocks: int
    frozen_in_blocks: int
    rest: str
    adapter: str
    adapter_trainable: int
    head: int
    head_trainable: int


class StepSeconds(RecordPart):
    """The distribution of the times of whole optimiser steps."""

    median: float
    mean: float
    p10: float
    p90: float
    std: float


class Timing(Record):
    """timing.json: whole optimiser steps, and what else took time."""

    steps: int
    warmup_steps: int = 0
    warmup_seconds: float = 0.0
    only_warmup: bool = False
    step_seconds: StepSeconds | None = None
    tokens_per_second: float | None = None
    step_seconds_sample: list[float] = []
    train_seconds: float = 0.0
    seconds_apart: dict[str, float] = {}
    notes: list[str] = []


class TaskRecord(RecordPart):
    """What a run was trained for."""

    kind: Kind
    name: str


class Majority(RecordPart):
    """The most frequent class, and the accuracy of always answering it."""

    label: str
    accuracy: float


class ClassMetrics(RecordPart):
    """How well one class was recognised: `support` examples have it, and `predicted` times it was the answer."""

    support: int
    predicted: int
    precision: float
    recall: float
    f1: float


class TaskMetrics(RecordPart):
    """The metrics of a validation beside its loss. The task decides which of them are measured.

    `masked_perplexity` is e to the mean loss of masked tokens, of which a model sees what follows too: no perplexity of
    a text. `token_accuracy` is the share of the predicted tokens that were found most likely.
    """

    perplexity: float | None = None
    masked_perplexity: float | None = None
    bits_per_byte: float | None = None
    accuracy: float | None = None
    macro_f1: float | None = None
    matthews: float | None = None
    token_accuracy: float | None = None
    exact_match: float | None = None
    chrf: float | None = None
    bleu: float | None = None
    majority: Majority | None = None


class SliceLoss(RecordPart):
    """The mean loss of the tokens of one slice, in nats, and how many they are."""

    loss: float | None
    tokens: int


class Metrics(TaskMetrics):
    """What a validation measured.

    `slices` are those of a language model's loss, which training/tasks/slices.py defines, by part and name.
    `document_losses` and `document_tokens` are of a test text: the summed loss of each document and the number of its
    tokens that were predicted, or those of each of 4,096 parts of a text with more documents.
    """

    loss: float | None
    n: int | None = None
    held_out: int | None = None
    at_chance: bool | None = None
    confusion: list[list[int]] | None = None
    per_class: dict[str, ClassMetrics] | None = None
    by_distance: dict[str, float] | None = None
    slices: dict[str, dict[str, SliceLoss]] | None = None
    document_losses: list[float] | None = None
    document_tokens: list[int] | None = None


class Validation(Metrics):
    """The metrics of one split at one step; only those of the validation split have an epoch."""

    step: int
    epoch: float | None = None


class Reached(RecordPart):
    """When a target of `eval.targets` was first reached."""

    step: int
    tokens: int
    seconds: float


class Result(Record, TaskMetrics):
    """result.json: the figures of a run that took all its steps, what they cost, and what a reader must know.

    The metrics at the top level are those of the last model, `best_...` those of the best one; `last` and `best` hold
    all of them. `best` is None where no validation had a finite loss. `flops_per_token` is what one token's training
    step must compute, with what was frozen at the end.
    """

    status: Literal["finished"]
    id: str
    task: TaskRecord
    val_loss: float | None = None
    best_val_loss: float | None = None
    best_perplexity: float | None = None
    best_masked_perplexity: float | None = None
    best_accuracy: float | None = None
    best_step: int | None = None
    labels: list[str] | None = None
    at_chance: bool = False
    last: Validation
    best: Validation | None = None
    evaluations: dict[str, Validation] = {}
    steps: int
    tokens: int
    epochs: float
    parameters: Parameters
    flops_per_token: float | None = None
    step_seconds: StepSeconds | None = None
    tokens_per_second: float | None = None
    peak_memory: int | None = None
    seconds: float
    gpu_hours: float | None = None
    reached: dict[Annotated[float, Field(strict=False)], Reached] = {}
    skipped_steps: int = 0
    warnings: list[str] = []
    notes: list[str] = []
    data: DataSummary


class TextScores(RecordPart):
    """What was counted in texts that a model wrote.

    distinct            the share of different runs of 1, 2 and 3 words among all of them
    repetition          the share of runs of 4 words that the same text had before
    self_bleu           the mean BLEU (0 to 100) of a text against the others that continue the same prompt
    judge_perplexity    how unlikely another model finds the texts, per token of its own
    """

    words: int
    distinct: list[float | None]
    repetition: float | None
    self_bleu: float | None
    judge_perplexity: float | None


class SampledPrompt(RecordPart):
    """A prompt and its continuations, which do not repeat it."""

    prompt: str
    texts: list[str]


class StoryRecall(Record):
    """recall.json: the share of the words of the built-in stories that follow from an earlier sentence, and how many
    there are, of which one of a run's models finds the right one most likely.
    """

    recall: float
    words: int
    model: str
    step: int


class Samples(Record):
    """Texts that a run's model wrote, how they were sampled, and their scores. `judge` names the other model."""

    model: str
    step: int | None
    tokens: int | None
    temperature: float
    top_k: int
    seed: int
    judge: str | None
    scores: TextScores
    prompts: list[SampledPrompt]


class DownstreamMetric(RecordPart):
    """A metric of a task over all of its items, with its standard error over the items and the value of each.

    `share` says that it is a mean of values from 0 to 1. `weights` are the words or bytes that each item counts for.
    `items` is empty where they are no numbers. A filter of the answers is part of the name: "exact_match,strict".
    """

    name: str
    value: float
    standard_error: float | None = None
    higher_is_better: bool
    share: bool = False
    items: list[float] = []
    weights: list[float] = []


class DownstreamTask(RecordPart):
    """How one of a run's models did on one task of lm-eval.

    `sha256` is the hash of the items with their prompts and answers, in order: equal hashes are the same questions.
    `cut` is how many texts lost their start, because the model has too few positions.
    """

    task: str
    version: str
    shots: int
    limit: int | None = None
    items: int
    available: int
    cut: int = 0
    sha256: str
    metrics: list[DownstreamMetric]
    model: str
    step: int | None = None
    lm_eval: str
    device: str
    seconds: float

    @property
    def key(self) -> str:
        """Return what tells this from the run's other tasks: the name, with the number of examples shown, if any."""
        return f"{self.task}@{self.shots}" if self.shots else self.task


class Downstream(Record):
    """downstream.json: the tasks that a run's model was evaluated on after its end, the latest of each."""

    tasks: list[DownstreamTask]

    def write(self, path: Path) -> None:
        """Write the record to a file, atomically and shortly: an item has no line of its own, and 1.0 is 1."""
        content = self.model_dump(exclude_unset=True)
        for metric in (metric for task in content["tasks"] for metric in task["metrics"]):
            for values in ("items", "weights"):
                numbers = metric.get(values, [])
                metric[values] = [int(number) if number.is_integer() else number for number in numbers]
        write_json(path, {"format": self.format, **content}, indent=None, separators=(",", ":"))


class RunProgress(RecordPart):
    """How far a run has come, on which machine, and its latest figures."""

    host: str | None = None
    pid: int | None = None
    updated: float | None = None
    step: int | None = None
    max_steps: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    perplexity: float | None = None
    masked_perplexity: float | None = None
    accuracy: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    memory: int | None = None
    message: str | None = None


class Status(Record, RunProgress):
    """status.json: the state of a run and its progress. An archived one has neither host nor process id."""

    id: str
    state: State
    signal: str | None = None


class Clock(RecordPart):
    """Seconds since the run's first step, and the mean seconds per step since the last line."""

    seconds: float
    step_seconds: float | None = None


class TrainLine(RecordPart):
    """A line of metrics.jsonl: the training loss since the last such line."""

    kind: Literal["train"] = "train"
    step: int
    tokens: int
    loss: float | None = None
    learning_rate: float | None = None
    gradient_norm: float | None = None
    time: Clock


class ValLine(Validation):
    """A line of metrics.jsonl: a validation."""

    kind: Literal["val"] = "val"
    tokens: int
    time: Clock


class EventLine(RecordPart):
    """A line of metrics.jsonl: the schedule froze or unfroze matrices at the start of a step."""

    kind: Literal["event"] = "event"
    step: int
    event: Literal["freeze", "unfreeze"]
    matrices: list[str]
    trainable: int


class LayerAttention(RecordPart):
    """How the attention of one layer spreads over its keys."""

    label: str
    entropy: float | None = None
    entropy_share: float | None = None
    logit_std: float | None = None


class AttentionLine(RecordPart):
    """A line of metrics.jsonl: the attention of every layer, on the first validation examples."""

    kind: Literal["attention"] = "attention"
    step: int
    layers: list[LayerAttention]


class KernelTime(RecordPart):
    """A kernel in one step of an arm: its kind, its milliseconds and its launches, as torch's profiler saw them."""

    name: str
    kind: str
    ms: float
    launches: float


class BenchOrigin(RecordPart):
    """Where a benchmark was made: the command, the commit of the code, the device, its clock in MHz, the versions."""

    command: str
    git_commit: str | None
    device: str
    clock_mhz: int | None = None
    versions: Versions


class BenchRow(RecordPart):
    """What the rows of all benchmarks may hold: their origin, the median of every round in milliseconds, in order, and
    the kernels of a step (`oelm bench --profile`).
    """

    origin: BenchOrigin | None = None
    round_ms: list[float] = []
    kernels: list[KernelTime] = []


class StepBench(BenchRow):
    """A row of `oelm bench --json`: the training steps of one arm, with the ratio of its times to the first arm's.

    `ratio_95` is half of the ratio's 95 % interval, None with one round. `warning` says that the arms' batches differ,
    so that only the ratio per example compares them.
    """

    arm: str
    step_ms: float
    tokens_per_second: float
    mfu: float | None
    ratio: float
    ratio_95: float | None
    flop_bound: float
    trainable: int
    peak_memory: int | None
    rounds: int
    batch_size: int
    ratio_per_example: float
    ratio_per_example_95: float | None
    warning: str | None


class DecodeBench(BenchRow):
    """A row of `oelm bench --decode --json`: the tokens that one arm generates in one setting, and its cache's size.

    token_ms .. ratio_95    None where the arm, or the first one, could not be timed; `error` says why
    cache_bytes_per_token   of one token of one text, in all layers
    context, batch_size     the setting; ratios are to the first arm in the same one
    prefill_ms              reading the context once, for `prefill_rows` texts; the other rows got copies
    kernel, kernel_ms       what computed plain attention on a GPU, and a token's time with each kernel tried
    """

    arm: str
    token_ms: float | None
    tokens_per_second: float | None
    ratio: float | None
    ratio_95: float | None
    cache_bytes_per_token: float
    cache_ratio: float
    layers: int | None = None
    context: int
    batch_size: int
    compiled: bool
    rounds: int
    prefill_ms: float | None = None
    prefill_rows: int | None = None
    kernel: str | None = None
    kernel_ms: dict[str, float] = {}
    error: str | None = None


MetricLine = Annotated[TrainLine | ValLine | EventLine | AttentionLine, Field(discriminator="kind")]
_LINE: TypeAdapter[MetricLine] = TypeAdapter(MetricLine)

BenchRows = list[StepBench] | list[DecodeBench]
_BENCH: TypeAdapter[BenchRows] = TypeAdapter(BenchRows)

_R = TypeVar("_R", bound=Record)


def read(path: Path, record: type[_R]) -> _R:
    """Return the record in a JSON file; raise a FileError that names the file where it holds something else.

    A record of another format raises FormatError, which says which format was found and which is needed.
    """
    content = read_record(path)
    number = content.get("format")
    if number != FORMAT:
        written = "no format number" if number is None else f"format {number!r}"
        raise FormatError(
            f"{path}: a record with {written}, and this oelm reads format {FORMAT}. Read it with the version of oelm "
            "that wrote it, or train the run again"
        )
    try:
        return record.model_validate(content)
    except ValidationError as error:
        raise FileError(f"{path}: {explain(error, record)}") from None
    except OelmError as error:  # the classes of the config raise their own errors
        raise FileError(f"{path}: {error}") from None


def read_optional(path: Path, record: type[_R]) -> _R | None:
    """Return the record in a JSON file, or None where there is no such file."""
    return read(path, record) if path.is_file() else None


def parse_line(line: str) -> MetricLine:
    """Return one line of metrics.jsonl as its type; raise a ValueError where it is malformed."""
    return _LINE.validate_python(json.loads(line))


def parse_bench(text: str) -> BenchRows:
    """Return the rows that `oelm bench --json` printed; raise a ValueError where the text is anything else."""
    rows = _BENCH.validate_python(json.loads(text))
    if not rows:
        raise ValueError("a benchmark has at least one arm")
    return rows
