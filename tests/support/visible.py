"""The ways in which a kernel may be told of a mask."""

from collections.abc import Iterator

from torch import Tensor

from oelm.models.attention.visible import Visible


def readings(mask: Tensor | None) -> Iterator[Visible]:
    """Yield what a kernel reads of a mask and, where the ranges alone say it all, the ranges without it."""
    visible = Visible.of(mask)
    yield visible
    if visible.kind == "boolean" and not visible.ranges[:, 2].any():
        yield Visible(None, visible.ranges)
