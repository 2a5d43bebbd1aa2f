"""How a run's model was trained, from the run's records, for the card of the exported model."""

from __future__ import annotations

from pathlib import Path

from ..base.files import looks_local
from ..config import GPT, RANDOM, RunConfig
from ..models.card import Figure, Training
from ..runs.environment import config_of
from ..runs.schema import Environment, Metrics, Result, Validation, read
from ..training.best import model_step
from .load import model_folder

# The Hub's name of each metric that a validation may have.
_METRICS = {
    "loss": "loss",
    "perplexity": "perplexity",
    "masked_perplexity": "masked_perplexity",
    "token_accuracy": "token_accuracy",
    "bits_per_byte": "bits_per_byte",
    "accuracy": "accuracy",
    "macro_f1": "f1",
    "matthews": "matthews_correlation",
    "exact_match": "exact_match",
    "chrf": "chrf",
    "bleu": "bleu",
}


def training_facts(run: Path) -> Training:
    """Return how the model that `load_run` returns was trained; without figures if the run is unfinished."""
    config, environment = config_of(run), read(run / "environment.json", Environment)
    step = model_step(model_folder(run, last=False))
    result = read(run / "result.json", Result) if (run / "result.json").is_file() else None
    return Training(
        task=config.task.name,
        data=environment.data.description,
        base=_base(config),
        settings=tuple(_settings(config, environment, result, step).items()),
        figures=tuple(_figures(result, step)) if result is not None else (),
        notes=(*result.warnings, *result.notes) if result is not None else (),
    )


def _base(config: RunConfig) -> str | None:
    """Return the pretrained model's name on the Hub, or None for one that was built here or read from a folder."""
    name = config.model.name
    built_here = config.model.from_scratch or name.startswith((GPT, RANDOM))
    return None if built_here or looks_local(name) or Path(name).exists() else name


def _settings(config: RunConfig, environment: Environment, result: Result | None, step: int) -> dict[str, str]:
    optimizer, train, versions = config.optimizer, config.train, environment.versions
    name = Path(config.model.name).name if looks_local(config.model.name) else config.model.name
    settings = {
        "data": environment.data.description,
        "start": f"{name}, from scratch" if config.model.from_scratch else name,
        "seed": str(config.seed),
        "step of this model": f"{step:,}",
        "batch size": str(train.batch_size),
        "sequence length": f"at most {config.data.sequence_length}",
        "optimiser": "Muon for matrices, AdamW" if optimizer.name == "muon" else "AdamW",
        "learning rate": f"{optimizer.learning_rate:g}, {optimizer.schedule}, weight decay {optimizer.weight_decay:g}",
    }
    if result is not None:
        settings["steps in all"] = f"{result.steps:,} ({result.epochs:.3g} epochs, {result.tokens:,} tokens)"
        settings["time"] = f"{result.seconds:,.0f} s on {environment.hardware}"
    settings["versions"] = f"oelm {versions.oelm}, torch {versions.torch}, transformers {versions.transformers}"
    return settings


def _figures(result: Result, step: int) -> list[Figure]:
    """Return the figures that were measured on the model of this step."""
    measured: dict[str, Validation | None] = {"validation": result.best if _is_of(result.best, step) else result.last}
    measured |= result.evaluations
    return [
        Figure(split=split, metric=metric, value=value)
        for split, metrics in measured.items()
        if metrics is not None and _is_of(metrics, step)
        for metric, value in _values(metrics)
    ]


def _is_of(validation: Validation | None, step: int) -> bool:
    return validation is not None and validation.step == step


def _values(metrics: Metrics) -> list[tuple[str, float]]:
    named = ((hub_name, getattr(metrics, name)) for name, hub_name in _METRICS.items())
    return [(name, value) for name, value in named if value is not None]
