"""Orthogonal Extreme Learning Machine Transformers: set Query and Key once, orthogonally, freeze them, prove it."""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .apply import apply
    from .audit import FreezeReport, Verification, audit, verify
    from .checkpoint import export, load
    from .errors import CheckpointError, FamilyError, FreezeError, MethodError, ModelError, OelmError
    from .families import Family, Fused, Stack, register_family
    from .method import FeedForward, Method, Projection

# Loaded on first use: torch and transformers take seconds to import, and `oelm --help` needs neither.
_HOME = {
    "apply": "apply",
    "FreezeReport": "audit",
    "Verification": "audit",
    "audit": "audit",
    "verify": "audit",
    "export": "checkpoint",
    "load": "checkpoint",
    "CheckpointError": "errors",
    "FamilyError": "errors",
    "FreezeError": "errors",
    "MethodError": "errors",
    "ModelError": "errors",
    "OelmError": "errors",
    "Family": "families",
    "Fused": "families",
    "Stack": "families",
    "register_family": "families",
    "FeedForward": "method",
    "Method": "method",
    "Projection": "method",
}

__all__ = [
    "CheckpointError",
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
    "Projection",
    "Stack",
    "Verification",
    "__version__",
    "apply",
    "audit",
    "export",
    "load",
    "register_family",
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


class _Package(ModuleType):
    """Keeps `oelm.apply` a function: importing the submodule of that name would put the module in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in _HOME and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
