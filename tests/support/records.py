"""Records of runs, written by code: what the tests of analysis and report read. No model was trained for them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from oelm.base.strict import merge
from oelm.config import RunConfig

LABELS = ["negative", "positive"]


def write(folder: Path, name: str, content: Any) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(json.dumps(content, indent=1), encoding="utf-8")


def language_run(
    root: Path,
    method: str | dict[str, Any] = "baseline",
    seed: int = 0,
    loss: float | None = 3.0,
    rate: float = 1e-3,
    *,
    step_seconds: float = 0.02,
    changes: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    description: str = "built-in stories",
    notes: tuple[str, ...] = (),
    attention: bool = True,
    steps: int = 400,
) -> Path:
    """A finished language run whose last validation loss is `loss`."""
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
    config = RunConfig.load(merge(fields, changes or {}))
    folder = config.folder
    end = 3.0 if loss is None else loss
    lines: list[dict[str, Any]] = []
    reached: dict[str, Any] = {}
    for step in range(steps // 20, steps + 1, steps // 20):
        value = end + 2.0 * math.exp(-4 * step / steps) - 2.0 * math.exp(-4)
        clock = {"seconds": step * step_seconds, "step_seconds": step_seconds}
        common = {"step": step, "tokens": step * 2048, "time": clock}
        lines.append({"kind": "train", "loss": value + 0.05, "learning_rate": rate * (1 - step / steps), **common})
        if step % (steps // 4) == 0:
            at = None if loss is None and step == steps else value
            lines.append({"kind": "val", "loss": at, "perplexity": at and math.exp(at), **common})
            for target in config.eval.targets:
                if at is not None and math.exp(at) <= target:
                    when = {"step": step, "tokens": step * 2048, "seconds": step * step_seconds}
                    reached.setdefault(str(target), when)
            if attention:
                layers = [
                    {
                        "label": f"decoder {n}",
                        "entropy": 2.0 - n / 9,
                        "entropy_share": 0.8 - n / 9,
                        "logit_std": 1.0 + n,
                    }
                    for n in range(4)
                ]
                lines.append({"kind": "attention", "step": step, "layers": layers})
    perplexity = None if loss is None else math.exp(loss)
    result = {
        "status": "finished",
        "id": config.id,
        "task": {"kind": "language", "name": "language"},
        "val_loss": loss,
        "perplexity": perplexity,
        "bits_per_byte": None if loss is None else loss / 2.6,
        "best_val_loss": loss,
        "best_perplexity": perplexity,
        "best_step": steps,
        "steps": steps,
        "tokens": steps * 2048,
        "reached": reached,
        "notes": list(notes),
        "seconds": steps * step_seconds,
    }
    _finish(folder, config, result, audit(config.method.name), lines, step_seconds, description, environment)
    return folder


def classification_run(
    root: Path,
    method: str = "baseline",
    seed: int = 0,
    accuracy: float = 0.9,
    rate: float = 2e-5,
    *,
    task: str = "sst2",
    changes: dict[str, Any] | None = None,
    environment: dict[str, Any] | None = None,
    at_chance: bool = False,
) -> Path:
    """A finished fine-tuning run whose accuracy after the last epoch is `accuracy`."""
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
    config = RunConfig.load(merge(fields, changes or {}))
    right = round(1000 * accuracy)
    confusion = [[right // 2, 500 - right // 2], [500 - (right - right // 2), right - right // 2]]
    figures = {"loss": 1 - accuracy, "accuracy": accuracy, "macro_f1": accuracy - 0.001, "matthews": 2 * accuracy - 1}
    lines = []
    for epoch in (1, 2, 3):
        clock = {"time": {"seconds": 50.0 * epoch}, "tokens": 1000 * epoch, "epoch": float(epoch), "step": 100 * epoch}
        lines.append({"kind": "train", "loss": 1.2 / epoch, "learning_rate": rate * (3 - epoch) / 3, **clock})
        lines.append({"kind": "val", **figures, "accuracy": accuracy - 0.02 * (3 - epoch), **clock})
    result = {
        "status": "finished",
        "id": config.id,
        "task": {"kind": "classification", "name": task},
        "last": {**figures, "confusion": confusion, "n": 1000},
        "best": {"step": 300, "epoch": 3.0, **figures},
        "labels": LABELS,
        "majority": {"label": "positive", "accuracy": 0.51},
        "at_chance": at_chance,
        "val_loss": figures["loss"],
        **{name: figures[name] for name in ("accuracy", "macro_f1", "matthews")},
        "best_accuracy": accuracy,
        "steps": 300,
        "tokens": 3000,
        "notes": [],
        "warnings": [],
        "evaluations": {"mismatched": {"step": 300, **figures, "accuracy": accuracy - 0.01}} if task == "mnli" else {},
    }
    folder = config.folder
    _finish(folder, config, result, audit(config.method.name), lines, 0.1, f"{task} of GLUE", environment)
    return folder


def audit(method: str, layers: int = 4, width: int = 64, inner: int = 256, kind: str = "decoder") -> dict[str, Any]:
    """The audit of a small model: Q and K frozen in the methods that freeze them, a core in those that have one."""
    rows = []
    freezing = method not in (
        "baseline",
        "oelm-nofreeze",
        "custom",
        "identity-key",
        "identity-query",
        "random-nofreeze",
    )
    for layer in range(layers):
        for role in ("q", "k", "v", "o", "ffn_in", "ffn_out"):
            shape = {"ffn_in": [inner, width], "ffn_out": [width, inner]}.get(role, [width, width])
            weights = shape[0] * shape[1]
            frozen = weights if freezing and role in ("q", "k") else 0
            row = {"kind": kind, "layer": str(layer), "role": role, "init": "default", "shape": shape}
            row |= {"frozen": frozen, "trainable": weights - frozen, "path": f"h.{layer}.{role}"}
            if (method, role) in (("identity-key", "k"), ("identity-query", "q")):
                row |= {"init": "identity", "shape": [], "frozen": 0, "trainable": 0}
            rows.append(row)
    frozen = sum(int(str(row["frozen"])) for row in rows)
    total = sum(int(str(row["frozen"])) + int(str(row["trainable"])) for row in rows) + 100_000
    counts = {"total": total, "trainable": total - frozen, "frozen": frozen, "frozen_share": frozen / total}
    return {**counts, "buffers": 0, "method": method, "rows": rows}


def _finish(
    folder: Path,
    config: RunConfig,
    result: dict[str, Any],
    report: dict[str, Any],
    lines: list[dict[str, Any]],
    step_seconds: float,
    description: str,
    environment: dict[str, Any] | None,
) -> None:
    statistics = {"median": step_seconds, "mean": step_seconds, "p10": 0.9 * step_seconds, "p90": 1.2 * step_seconds}
    about = {
        "format": 1,
        "device": "cuda",
        "world_size": 1,
        "gpu": {"name": "Some GPU", "memory": 2**34, "cuda": "13.0"},
        "versions": {"oelm": "0.1.0", "torch": "2.13.0", "transformers": "5.22.2", "python": "3.11.9"},
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
    counts = {key: report[key] for key in ("total", "trainable", "frozen", "frozen_share", "buffers")}
    write(folder, "config.json", {"format": 1, "id": config.id, **config.to_dict()})
    write(folder, "environment.json", merge(about, environment or {}))
    write(folder, "audit.json", report)
    sample = [step_seconds * (1 + 0.2 * math.sin(n)) for n in range(200)]
    timing = {"steps": 390, "only_warmup": False, "step_seconds": statistics, "step_seconds_sample": sample}
    write(folder, "timing.json", timing)
    write(folder, "result.json", {**result, "parameters": counts, "step_seconds": statistics})
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


def change(folder: Path, name: str, **values: Any) -> None:
    """Change fields of a record's file."""
    write(folder, name, {**json.loads((folder / name).read_text(encoding="utf-8")), **values})


def study(root: Path, gap: float = 0.1, seeds: int = 3) -> Path:
    """Two arms, three rates, several seeds: freeze is worse by `gap` in the loss, with a little noise per seed."""
    noise = (0.0, 0.004, -0.003, 0.002, -0.002, 0.005, -0.004, 0.001)
    for seed in range(seeds):
        for rate, worse in ((5e-4, 0.05), (1e-3, 0.0), (2e-3, 0.08)):
            language_run(root, "baseline", seed, 3.2 + worse + 2 * noise[seed], rate)
            language_run(root, "oelm-freeze", seed, 3.2 + worse + gap + noise[seed], rate)
    return root
