"""Write plans of studies and synthetic records of their runs, for the tests of the lab, the analysis and the report."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from oelm.lab.confirm import load_study
from oelm.runs.confirmation import Study
from tests.support.records import change, language_run, write_status

DOCUMENTS = [100 + 10 * number for number in range(20)]


def hypothesis(id: str, arm: str, margin: float = 0.02, test: str = "paired", **fields: Any) -> dict[str, Any]:
    """Return a hypothesis of an arm of the experiment `conf` against its baseline."""
    names = {"arm": f"conf/{arm}", "against": "conf/baseline"}
    return {"id": id, "claim": f"{arm} loses little", **names, "margin": margin, "test": test, **fields}


def write_plan(
    folder: Path, hypotheses: list[dict[str, Any]], shown: list[dict[str, Any]] | None = None, **fields: Any
) -> Path:
    """Write a plan and its experiment, whose runs have the settings of `language_run`; return the plan's path."""
    methods = ["baseline", "identity-key", "oelm-freeze", "oelm-nofreeze", "oelm-random"]
    config = {
        "model": {"name": "gpt:tiny"},
        "data": {"path": "data/text", "sequence_length": 128},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 10},
        "train": {"max_steps": 400, "batch_size": 16},
        "eval": {"every": 100, "targets": [60.0, 40.0, 30.0, 25.0]},
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "conf.yaml").write_text(yaml.safe_dump({"config": config, "axes": {"method": methods}}), encoding="utf-8")
    confirmation = {
        "data": "a text of nobody's",
        "tokens": 400 * 16 * 128,
        "chooses": "val",
        "judges": "test",
        "runs": [{"experiment": "conf.yaml", "seeds": 6}],
        "hypotheses": hypotheses,
        **fields,
    }
    path = folder / "plan.yaml"
    plan = {"exploration": {"seed": 0}, "confirmation": confirmation, "shown": shown or []}
    path.write_text(yaml.safe_dump(plan, sort_keys=False), encoding="utf-8")
    return path


def group(**names: str) -> dict[str, Any]:
    """Return a group of the plan's arms, by the method in the names of its folders, against the baseline."""
    arms = {f"conf/{method.replace('_', '-')}": name for method, name in names.items()}
    return {"title": "A tiny GPT", "reference": {"conf/baseline": "the reference"}, "arms": arms}


def study_of(folder: Path, hypotheses: list[dict[str, Any]], **fields: Any) -> Study:
    """Write a plan and load it."""
    return load_study(write_plan(folder, hypotheses, **fields))


def planned_run(
    root: Path, study: Study, method: str, seed: int, loss: float | None, sha256: str | None = "", **changes: Any
) -> Path:
    """Write a finished run of a plan that is judged by `loss`, with the plan's mark, or that of `sha256`.

    A loss of None is a run that diverged.
    """
    mark = {"name": "plan.yaml", "sha256": study.sha256 if sha256 == "" else sha256}
    environment = {} if sha256 is None else {"plan": mark}
    fields = {"experiment": "conf", **changes}
    value = None if loss is None else loss - 0.05
    folder = language_run(root, method, seed, value, environment=environment, changes=fields)
    if loss is None:
        return folder
    tokens = np.array(DOCUMENTS)
    spread = np.linspace(-0.4, 0.4, len(tokens)) * (1 + 0.1 * len(method))
    by_document = tokens * (loss + spread - float(spread @ tokens / tokens.sum()))
    test = {"step": 400, "loss": loss, "perplexity": math.exp(loss)}
    test |= {"document_losses": by_document.tolist(), "document_tokens": tokens.tolist()}
    change(folder, "result.json", evaluations={"test": test})
    return folder


def fail(folder: Path) -> None:
    """Turn a finished run into one that failed."""
    (folder / "result.json").unlink()
    write_status(folder, "failed", message="TrainingError: the loss is not a number")


def recorded_logs(root: Path, method: str) -> dict[int, float]:
    """Return the logarithm of the test perplexity of every run of a method by its seed, read from the files alone."""
    logs = {}
    for file in root.glob(f"conf/{method}/seed-*/result.json"):
        test = json.loads(file.read_text(encoding="utf-8")).get("evaluations", {}).get("test")
        if test is not None:
            logs[int(file.parent.name.removeprefix("seed-"))] = math.log(test["perplexity"])
    return logs
