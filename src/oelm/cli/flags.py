"""How the help shows a flag: typer gives it the type of a value, `--quiet <bool>`, although it takes none."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class _PlainFlags:
    """Commands whose flags have no type in their help."""

    def get_params(self, ctx: Any) -> list[Any]:
        params: list[Any] = super().get_params(ctx)  # type: ignore[misc]
        for param in params:
            if getattr(param, "is_flag", False):
                param.metavar = ""
        return params


class Command(_PlainFlags, TyperCommand):
    """A command whose flags have no type in their help."""


class CommandGroup(_PlainFlags, TyperGroup):
    """A group of commands whose flags have no type in their help."""
