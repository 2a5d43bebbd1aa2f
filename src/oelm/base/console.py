"""rich's console, in which text that comes from files cannot command the terminal."""

from __future__ import annotations

from collections.abc import Iterable

import rich.console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

from .text import visible


class Console(rich.console.Console):
    """A console that writes out escapes in what it shows, such as names of runs; its own colours stay."""

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the pieces of a renderable, with their text made visible."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(visible(segment.text), segment.style)
