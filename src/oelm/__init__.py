"""Orthogonal Extreme Learning Machine Transformers: set Query and Key once, orthogonally, freeze them, prove it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .config import RunConfig
    from .data.errors import DataError
    from .errors import (
        CheckpointError,
        ConfigError,
        FamilyError,
        FreezeError,
        MethodError,
        ModelError,
        OelmError,
        TrainingError,
    )
    from .families import Family, Fused, Stack, register_family
    from .method import Adapter, FeedForward, Method, Projection, Schedule
    from .models.checkpoint import export, load
    from .modules import OrthogonalLinear, OrthogonalMultiHeadAttention
    from .operate import apply
    from .proof import FreezeReport, Verification, audit, verify
    from .training.engine import Stopped, train

# Loaded on first use: torch and transformers take seconds to import, and `oelm --help` needs neither.
_HOME = {
    "RunConfig": "config",
    "DataError": "data.errors",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "FamilyError": "errors",
    "FreezeError": "errors",
    "MethodError": "errors",
    "ModelError": "errors",
    "OelmError": "errors",
    "TrainingError": "errors",
    "Family": "families",
    "Fused": "families",
    "Stack": "families",
    "register_family": "families",
    "FeedForward": "method",
    "Method": "method",
    "Projection": "method",
    "Adapter": "method",
    "Schedule": "method",
    "export": "models.checkpoint",
    "load": "models.checkpoint",
    "OrthogonalLinear": "modules",
    "OrthogonalMultiHeadAttention": "modules",
    "apply": "operate",
    "FreezeReport": "proof",
    "Verification": "proof",
    "audit": "proof",
    "verify": "proof",
    "Stopped": "training.engine",
    "train": "training.engine",
}

__all__ = [
    "Adapter",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Family",
    "FamilyError",
    "FeedForward",
    "FreezeError",
    "FreezeReport",
    "Fused",
    "Method",
    "MethodError",
    "ModelError",
    "OelmError",
    "OrthogonalLinear",
    "OrthogonalMultiHeadAttention",
    "Projection",
    "RunConfig",
    "Schedule",
    "Stack",
    "Stopped",
    "TrainingError",
    "Verification",
    "__version__",
    "apply",
    "audit",
    "export",
    "load",
    "register_family",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'oelm' has no attribute {name!r}")
    value = getattr(import_module(f".{_HOME[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
