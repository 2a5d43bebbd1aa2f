"""Orthogonal Extreme Learning Machine Transformers: set Query and Key orthogonally, freeze them, and verify it."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

if TYPE_CHECKING:
    from .config import RunConfig
    from .errors import (
        CheckpointError,
        ConfigError,
        DataError,
        FamilyError,
        FileError,
        FreezeError,
        MethodError,
        ModelError,
        OelmError,
        TrainingError,
    )
    from .method.apply import apply
    from .method.audit import audit
    from .method.families import Family, Fused, Stack, register_family
    from .method.freeze_report import FreezeReport
    from .method.layers import OrthogonalLinear, OrthogonalMultiHeadAttention
    from .method.seal import Verification, verify
    from .method.spec import Adapter, FeedForward, Method, Projection, Schedule
    from .models.export import export
    from .models.halve_cache import halve_cache, restore_cache
    from .models.load import load
    from .training.engine import Stopped, train

# The modules of the public names. A name is imported on first use: torch and transformers take seconds to import, and
# `oelm --help` needs neither.
_NAMES = {
    "config": "RunConfig",
    "errors": "CheckpointError ConfigError DataError FamilyError FileError FreezeError MethodError ModelError "
    "OelmError TrainingError",
    "method.apply": "apply",
    "method.audit": "audit",
    "method.families": "Family Fused Stack register_family",
    "method.freeze_report": "FreezeReport",
    "method.layers": "OrthogonalLinear OrthogonalMultiHeadAttention",
    "method.seal": "Verification verify",
    "method.spec": "Adapter FeedForward Method Projection Schedule",
    "models.export": "export",
    "models.halve_cache": "halve_cache restore_cache",
    "models.load": "load",
    "training.engine": "Stopped train",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = [
    "Adapter",
    "CheckpointError",
    "ConfigError",
    "DataError",
    "Family",
    "FamilyError",
    "FeedForward",
    "FileError",
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
    "halve_cache",
    "load",
    "register_family",
    "restore_cache",
    "train",
    "verify",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module 'oelm' has no attribute {name!r}")
    value = getattr(import_module(f".{_MODULE_OF[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
