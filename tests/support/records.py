"""Write records of runs that were never trained, for the tests of analysis and report."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypedDict, Unpack

from oelm.base.strict import merge
from oelm.config import RunConfig
from oelm.runs.folder import line_to_json
from oelm.runs.schema import (
    FORMAT,
    AttentionLine,
    Audit,
    AuditRow,
    Clock,
    DataSummary,
    Downstream,
    DownstreamMetric,
    DownstreamTask,
    LayerAttention,
    Majority,
    MetricLine,
    Parameters,
    Reached,
    RecordedConfig,
    Result,
    StepSeconds,
    TaskRecord,
    Timing,
    TrainLine,
    Validation,
    ValLine,
)

LABELS = ["negative", "positive"]
# Methods that train Q and K: the audit of any other has them frozen.
_TRAINING_QK = ("baseline", "oelm-nofreeze", "custom", "identity-key", "identity-query", "random-nofreeze")
_LAYERS, _WIDTH, _INNER = 4, 64, 256


class LanguageOptions(TypedDict, total=False):
    """Optional settings of `language_run`; their defaults are in the function."""

    step_seconds: float
    changes: dict[str, Any]
    environment: dict[str, Any]
    description: str
    notes: tuple[str, ...]
    attention: bool
    steps: int


@dataclass(frozen=True)
class _Records:
    """The records of a run that differ between tasks, and the values that the other records are made from."""

    config: RunConfig
    result: dict[str, Any]
    lines: list[MetricLine]
    step_seconds: float
    description: str
    environment: dict[str, Any]


def write(folder: Path, name: str, content: Any) -> None:
    """Write any JSON as a file of a run."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def write_status(folder: Path, state: str, **fields: Any) -> None:
    """Write the status of a run."""
    write(folder, "status.json", {"format": FORMAT, "id": "run-id", "state": state, **fields})


def bench_row(arm: str = "baseline", **fields: Any) -> dict[str, Any]:
    """Return a row of `oelm bench --json`."""
    times = {"step_ms": 10.0, "tokens_per_second": 1e6, "mfu": None, "ratio": 1.0, "ratio_95": None, "flop_bound": 1.0}
    batch = {"batch_size": 16, "ratio_per_example": 1.0, "ratio_per_example_95": None, "warning": None}
    return {"arm": arm, **times, **batch, "trainable": 10, "peak_memory": None, "rounds": 5, **fields}


def decode_row(arm: str, cache: float) -> dict[str, Any]:
    """Return a row of `oelm bench --decode --json`."""
    times = {"token_ms": 2.0, "tokens_per_second": 500.0, "ratio": 1.0, "ratio_95": None}
    setting = {"context": 4096, "batch_size": 8, "compiled": False, "rounds": 5}
    return {"arm": arm, **times, "cache_bytes_per_token": cache, "cache_ratio": 1.0, **setting}


def change(folder: Path, name: str, **values: Any) -> None:
    """Change fields of a record's file."""
    write(folder, name, {**json.loads((folder / name).read_text(encoding="utf-8")), **values})


def language_run(
    root: Path,
    method: str | dict[str, Any] = "baseline",
    seed: int = 0,
    loss: float | None = 3.0,
    rate: float = 1e-3,
    **options: Unpack[LanguageOptions],
) -> Path:
    """Write a finished language run whose last validation loss is `loss`."""
    steps, step_seconds = options.get("steps", 400), options.get("step_seconds", 0.02)
    fields: dict[str, Any] = {
        "experiment": f"lr-{rate:g}",
        "seed": seed,
        "method": method,
        "model": {"name": "gpt:tiny"},
        "data": {"path": "data/text", "sequence_length": 128},
        "optimizer": {"learning_rate": rate, "warmup_steps": 10},
        "train": {"max_steps": steps, "batch_size": 16},
        "eval": {"every": steps // 4, "targets": [60.0, 40.0, 30.0, 25.0]},
        "output": str(root),
    }
    config = RunConfig.load(merge(fields, options.get("changes", {})))
    lines, reached = _language_lines(config, loss, step_seconds, options.get("attention", True))
    perplexity = None if loss is None else math.exp(loss)
    bits = None if loss is None else loss / 2.6
    last = Validation(step=steps, loss=loss, perplexity=perplexity, bits_per_byte=bits)
    result: dict[str, Any] = {
        "val_loss": loss,
        "perplexity": perplexity,
        "bits_per_byte": bits,
        "best_val_loss": loss,
        "best_perplexity": perplexity,
        "best_step": steps,
        "last": last,
        "best": None if loss is None else last,
        "steps": steps,
        "tokens": steps * 2048,
        "reached": reached,
        "notes": list(options.get("notes", ())),
        "seconds": steps * step_seconds,
    }
    description, environment = options.get("description", "built-in stories"), options.get("environment", {})
    return _write_run(_Records(config, result, lines, step_seconds, description, environment))


def _language_lines(
    config: RunConfig, loss: float | None, step_seconds: float, attention: bool
) -> tuple[list[MetricLine], dict[float, Reached]]:
    """Return the metrics of a run whose loss falls to `loss`, and when it reached its targets."""
    steps, rate = config.train.max_steps or 0, config.optimizer.learning_rate
    lines: list[MetricLine] = []
    reached: dict[float, Reached] = {}
    for step in range(steps // 20, steps + 1, steps // 20):
        value = (3.0 if loss is None else loss) + 2.0 * math.exp(-4 * step / steps) - 2.0 * math.exp(-4)
        clock = Clock(seconds=step * step_seconds, step_seconds=step_seconds)
        common: dict[str, Any] = {"step": step, "tokens": step * 2048, "time": clock}
        lines.append(TrainLine(loss=value + 0.05, learning_rate=rate * (1 - step / steps), **common))
        if step % (steps // 4) == 0:
            val_loss = None if loss is None and step == steps else value
            lines.append(ValLine(loss=val_loss, perplexity=val_loss and math.exp(val_loss), **common))
            for target in config.eval.targets:
                if val_loss is not None and math.exp(val_loss) <= target:
                    reached_at = Reached(step=step, tokens=step * 2048, seconds=step * step_seconds)
                    reached.setdefault(target, reached_at)
            if attention:
                lines.append(AttentionLine(step=step, layers=[_layer_attention(n) for n in range(_LAYERS)]))
    return lines, reached


class ClassificationOptions(TypedDict, total=False):
    """Optional settings of `classification_run`; their defaults are in the function."""

    task: str
    changes: dict[str, Any]
    environment: dict[str, Any]
    at_chance: bool


def classification_run(
    root: Path,
    method: str = "baseline",
    seed: int = 0,
    accuracy: float = 0.9,
    rate: float = 2e-5,
    **options: Unpack[ClassificationOptions],
) -> Path:
    """Write a finished fine-tuning run whose accuracy after the last epoch is `accuracy`."""
    task = options.get("task", "sst2")
    fields: dict[str, Any] = {
        "experiment": f"{task}-lr-{rate:g}",
        "seed": seed,
        "task": task,
        "method": method,
        "model": {"name": "bert-base-uncased"},
        "data": {"sequence_length": 128},
        "optimizer": {"learning_rate": rate},
        "output": str(root),
    }
    config = RunConfig.load(merge(fields, options.get("changes", {})))
    correct = round(1000 * accuracy)
    confusion = [[correct // 2, 500 - correct // 2], [500 - (correct - correct // 2), correct - correct // 2]]
    metrics = {"loss": 1 - accuracy, "accuracy": accuracy, "macro_f1": accuracy - 0.001, "matthews": 2 * accuracy - 1}
    lines: list[MetricLine] = []
    for epoch in (1, 2, 3):
        common: dict[str, Any] = {"step": 100 * epoch, "tokens": 1000 * epoch, "time": Clock(seconds=50.0 * epoch)}
        lines.append(TrainLine(loss=1.2 / epoch, learning_rate=rate * (3 - epoch) / 3, **common))
        validation_metrics: dict[str, Any] = {**metrics, "accuracy": accuracy - 0.02 * (3 - epoch)}
        lines.append(ValLine(**validation_metrics, epoch=float(epoch), **common))
    mismatched = Validation.model_validate({"step": 300, **metrics, "accuracy": accuracy - 0.01})
    result: dict[str, Any] = {
        "last": Validation.model_validate({"step": 300, "epoch": 3.0, **metrics, "confusion": confusion, "n": 1000}),
        "best": Validation.model_validate({"step": 300, "epoch": 3.0, **metrics}),
        "labels": LABELS,
        "majority": Majority(label="positive", accuracy=0.51),
        "at_chance": options.get("at_chance", False),
        "val_loss": metrics["loss"],
        **{name: metrics[name] for name in ("accuracy", "macro_f1", "matthews")},
        "best_accuracy": accuracy,
        "steps": 300,
        "tokens": 3000,
        "seconds": 150.0,
        "evaluations": {"mismatched": mismatched} if task == "mnli" else {},
    }
    return _write_run(_Records(config, result, lines, 0.1, f"{task} of GLUE", options.get("environment", {})))


def probe_run(
    root: Path, form: str, task: str, seed: int, shares: dict[int, float], method: str = "baseline", **model: Any
) -> Path:
    """Write a finished run on a generated task, with its share of right answers by step; `model` are its fields."""
    fields: dict[str, Any] = {
        "experiment": f"probe-{form}-task-generated-{task}",
        "seed": seed,
        "task": f"generated:{task}",
        "method": method,
        "model": {"name": "gpt:modern-tiny", "fields": model},
        "output": str(root),
    }
    config, (last, accuracy) = RunConfig.load(fields), list(shares.items())[-1]
    lines: list[MetricLine] = [
        ValLine(loss=1 - share, accuracy=share, step=step, tokens=step, time=Clock(seconds=float(step)))
        for step, share in shares.items()
    ]
    judged = Validation(step=last, loss=1 - accuracy, accuracy=accuracy)
    figures = {"val_loss": judged.loss, "accuracy": accuracy, "majority": Majority(label="54", accuracy=0.07)}
    result: dict[str, Any] = {"last": judged, "steps": last, "tokens": last, "seconds": 1.0, **figures}
    description = f"generated sequences of 64 tokens, seed {seed}: {task}"
    environment = {"data": {"splits": {"train": {"sha256": f"of seed {seed}"}}}}
    return _write_run(_Records(config, result, lines, 0.1, description, environment))


def task_score(task: str = "choices", right: int = 5, **changes: Any) -> DownstreamTask:
    """Return the score on a task of ten questions, of which `right` were answered rightly."""
    items, error = [1.0] * right + [0.0] * (10 - right), math.sqrt(right * (10 - right) / 900)
    shares: dict[str, Any] = {"value": right / 10, "standard_error": error, "higher_is_better": True, "share": True}
    fields = {"version": "1", "shots": 0, "items": 10, "available": 10, "sha256": "ab"}
    about = {"model": "best", "step": 400, "lm_eval": "0.4.13", "device": "cpu", "seconds": 1.0}
    metrics = [DownstreamMetric(name="acc", items=items, **shares)]
    return DownstreamTask.model_validate({"task": task, **fields, **about, "metrics": metrics, **changes})


def write_scores(run: Path, *scores: DownstreamTask) -> None:
    """Write what a run scored on tasks."""
    Downstream(tasks=list(scores)).write(run / "downstream.json")


def audit(method: str) -> Audit:
    """Return the audit of a small model: Q and K are frozen if the method freezes them; an identity has no weights."""
    rows = []
    for layer in range(_LAYERS):
        for role in ("q", "k", "v", "o", "ffn_in", "ffn_out"):
            shape = {"ffn_in": [_INNER, _WIDTH], "ffn_out": [_WIDTH, _INNER]}.get(role, [_WIDTH, _WIDTH])
            weights = shape[0] * shape[1]
            frozen = weights if method not in _TRAINING_QK and role in ("q", "k") else 0
            identity = (method, role) in (("identity-key", "k"), ("identity-query", "q"))
            rows.append(
                AuditRow(
                    kind="decoder",
                    layer=str(layer),
                    role=role,
                    path=f"h.{layer}.{role}",
                    init="identity" if identity else "default",
                    shape=[] if identity else shape,
                    frozen=0 if identity else frozen,
                    trainable=0 if identity else weights - frozen,
                )
            )
    frozen = sum(row.frozen for row in rows)
    blocks = frozen + sum(row.trainable for row in rows)
    total = blocks + 100_000
    return Audit(
        model="a small model",
        method=method,
        seed=0,
        rows=rows,
        total=total,
        trainable=total - frozen,
        frozen=frozen,
        frozen_share=frozen / total,
        frozen_share_of_blocks=frozen / blocks,
        buffers=0,
        blocks=blocks,
        frozen_in_blocks=frozen,
        rest="trained",
        adapter="",
        adapter_trainable=0,
        head=0,
        head_trainable=0,
    )


def _layer_attention(layer: int) -> LayerAttention:
    statistics = {"entropy": 2.0 - layer / 9, "entropy_share": 0.8 - layer / 9, "logit_std": 1.0 + layer}
    return LayerAttention(label=f"decoder {layer}", **statistics)


def add_slices(run: Path, hit: float, rest: float, tokens: int = 1000, text: str = "validation") -> Path:
    """Write slices of the loss into a run's result: a fifth of the tokens are hits, and half stand in each band."""
    result = json.loads((run / "result.json").read_text(encoding="utf-8"))
    mean, hits = (hit + 4 * rest) / 5, tokens // 5
    named = {
        "position": {
            "9-16": {"loss": mean - 0.1, "tokens": tokens // 2},
            "1-8": {"loss": mean + 0.1, "tokens": tokens // 2},
        },
        "recall": {"rest": {"loss": rest, "tokens": tokens - hits}, "hit": {"loss": hit, "tokens": hits}},
        "frequency": {
            "rest common": {"loss": rest, "tokens": tokens - hits},
            "hit rare": {"loss": hit, "tokens": hits},
        },
    }
    judged = {**result["last"], "slices": named}
    change(run, "result.json", **({"evaluations": {"test": judged}} if text == "test" else {"last": judged}))
    return run


def _write_run(records: _Records) -> Path:
    config, folder, seconds = records.config, records.config.folder, records.step_seconds
    report = audit(config.method.name)
    statistics = StepSeconds(median=seconds, mean=seconds, p10=0.9 * seconds, p90=1.2 * seconds, std=0.1 * seconds)
    folder.mkdir(parents=True, exist_ok=True)
    RecordedConfig(id=config.id, config=config).write(folder / "config.json")
    write(folder, "environment.json", merge(_environment(records.description), records.environment))
    report.write(folder / "audit.json")
    Timing(
        steps=390,
        only_warmup=False,
        step_seconds=statistics,
        step_seconds_sample=[seconds * (1 + 0.2 * math.sin(n)) for n in range(200)],
    ).write(folder / "timing.json")
    Result(
        status="finished",
        id=config.id,
        task=TaskRecord(kind=config.task.kind, name=config.task.name),
        epochs=3.0,
        parameters=Parameters.model_validate(report.model_dump(include=set(Parameters.model_fields))),
        # A trained weight costs six FLOPs per token, a frozen one four: it needs no gradient.
        flops_per_token=float(6 * report.trainable + 4 * report.frozen),
        step_seconds=statistics,
        data=DataSummary(description=records.description, synthetic=False),
        **records.result,
    ).write(folder / "result.json")
    text = "".join(f"{line_to_json(line)}\n" for line in records.lines)
    (folder / "metrics.jsonl").write_text(text, encoding="utf-8")
    return folder


def _environment(description: str) -> dict[str, Any]:
    versions = {"oelm": "0.1.0", "torch": "2.13.0", "transformers": "5.22.2", "python": "3.11.9"}
    return {
        "format": FORMAT,
        "device": "cuda",
        "world_size": 1,
        "gpu": {"name": "Some GPU", "memory": 2**34, "cuda": "13.0"},
        "cpu": {"count": 16, "machine": "x86_64", "threads": 8},
        "system": "Linux",
        "versions": {**versions, "tokenizers": "0.22.1", "numpy": "2.3.0"},
        "git_commit": "abc",
        "data": {
            "description": description,
            "synthetic": False,
            "vocab_size": 512,
            "splits": {
                "train": {"tokens": 1_000_000, "sha256": "ab" * 32},
                "val": {"tokens": 9_000, "sha256": "cd" * 32},
            },
        },
    }


def study(root: Path, gap: float = 0.1, seeds: int = 3) -> Path:
    """Write two arms at three rates with several seeds: freeze is worse by `gap` in the loss, with a little noise."""
    noise = (0.0, 0.004, -0.003, 0.002, -0.002, 0.005, -0.004, 0.001)
    for seed in range(seeds):
        for rate, worse in ((5e-4, 0.05), (1e-3, 0.0), (2e-3, 0.08)):
            language_run(root, "baseline", seed, 3.2 + worse + 2 * noise[seed], rate)
            language_run(root, "oelm-freeze", seed, 3.2 + worse + gap + noise[seed], rate)
    return root
