"""The freeze report: what is frozen in a model and what trains, as data and as text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.table import Table

from ..base.text import plain_table, plain_text


@dataclass(frozen=True, kw_only=True)
class MatrixRow:
    """One matrix of one block, with its bias, core and adapter: what it is, and how many of its parameters train."""

    kind: str
    layer: str
    role: str
    path: str
    init: str
    shape: tuple[int, ...]
    frozen: int
    trainable: int
    orthogonality_error: float | None
    sha256: str | None

    @property
    def state(self) -> str:
        """Return in words whether the parameters are frozen, trainable or some of each."""
        if not self.frozen and not self.trainable:
            return "no parameters"
        if not self.trainable:
            return "frozen"
        return "trainable" if not self.frozen else "frozen, rest trained"


@dataclass(frozen=True, kw_only=True)
class FreezeReport:
    """What is frozen in a model and what trains, counted from the model: tied weights once, buffers separately.

    `rest` is the method's; `adapter` describes its adapter in words, or is empty. The rows count adapters with their
    matrices.
    """

    model: str
    method: str
    seed: int | None
    rows: tuple[MatrixRow, ...]
    total: int
    trainable: int
    buffers: int
    blocks: int
    frozen_in_blocks: int
    rest: str
    adapter: str
    adapter_trainable: int
    head: int
    head_trainable: int

    def __getattr__(self, name: str) -> Any:
        """Say for a name that a report lacks where the model is: oelm.apply changes it in place."""
        raise AttributeError(
            f"a FreezeReport has no {name!r}. It is what oelm.apply returns; the model itself is changed in place: "
            "oelm.apply(model, ...), and then use model"
        )

    @property
    def frozen(self) -> int:
        """Return the number of frozen parameters."""
        return self.total - self.trainable

    @property
    def frozen_share(self) -> float:
        """Return the frozen share of all parameters."""
        return self.frozen / self.total if self.total else 0.0

    @property
    def frozen_share_of_blocks(self) -> float:
        """Return the frozen share of the blocks' parameters, embeddings and head not counted."""
        return self.frozen_in_blocks / self.blocks if self.blocks else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for a record."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__ if name != "rows"}
        shares = {"frozen": self.frozen, "frozen_share": self.frozen_share}
        rows = [{**row.__dict__, "shape": list(row.shape)} for row in self.rows]
        return {**fields, **shares, "frozen_share_of_blocks": self.frozen_share_of_blocks, "rows": rows}

    def __str__(self) -> str:
        """Return a table with one line per matrix, equal layers grouped together, and the totals below it."""
        seed = "" if self.seed is None else f", seed {self.seed}"
        return f"{plain_text(_table(self), f'{self.model}: {self.method}{seed}')}\n{_totals(self)}"


def _table(report: FreezeReport) -> Table:
    table = plain_table()
    kinds = list(dict.fromkeys(row.kind for row in report.rows))
    for name in ("layers", "matrix", "init", "shape"):
        table.add_column(name, no_wrap=True)
    for name in ("frozen", "trainable", "error"):
        table.add_column(name, justify="right", no_wrap=True)
    previous = kinds[0] if len(kinds) == 1 else ""  # attentions of several kinds get a heading each
    for rows in _groups_of_equal_layers(report.rows):
        first = rows[0]
        if first.kind != previous:
            previous = first.kind
            table.add_row(previous)
        errors = [row.orthogonality_error for row in rows if row.orthogonality_error is not None]
        table.add_row(
            _layer_ranges([row.layer for row in rows]),
            first.role,
            first.init,
            "×".join(str(size) for size in first.shape) or "-",
            f"{sum(row.frozen for row in rows):,}",
            f"{sum(row.trainable for row in rows):,}",
            f"{max(errors):.1e}" if errors else "-",
        )
    # What no row lists: embeddings, norms and the head. The head gets a line of its own where the body is frozen.
    rest_frozen = report.frozen - sum(row.frozen for row in report.rows)
    rest_trainable = report.trainable - sum(row.trainable for row in report.rows)
    if report.rest != "trained" and report.head:
        head_frozen = report.head - report.head_trainable
        table.add_row("", "head", "", "", f"{head_frozen:,}", f"{report.head_trainable:,}", "-")
        rest_frozen, rest_trainable = rest_frozen - head_frozen, rest_trainable - report.head_trainable
    table.add_row("", "the rest", "", "", f"{rest_frozen:,}", f"{rest_trainable:,}", "-", end_section=True)
    table.add_row("total", "", "", "", f"{report.frozen:,}", f"{report.trainable:,}", "")
    return table


def _totals(report: FreezeReport) -> str:
    """Return the counts in a sentence and, where the body is frozen or has adapters, a second one about what trains."""
    counts = (
        f"{report.total:,} parameters, {report.trainable:,} trainable;\n"
        f"{report.frozen:,} frozen: {report.frozen_share:.1%} of the model, "
        f"{report.frozen_share_of_blocks:.1%} of its blocks. Buffers: {report.buffers:,}."
    )
    if any(row.orthogonality_error is not None for row in report.rows):
        counts += "\nThe error is how far a matrix is from orthonormal, entry by entry, at most."
    if report.rest == "trained" and not report.adapter:
        return counts
    adapters = f"{report.adapter_trainable:,} in adapters ({report.adapter}),\n" if report.adapter else ""
    elsewhere = report.trainable - report.adapter_trainable - report.head_trainable
    return f"{counts}\nWhat trains: {adapters}{report.head_trainable:,} in the head, {elsewhere:,} elsewhere."


def _groups_of_equal_layers(rows: Iterable[MatrixRow]) -> list[list[MatrixRow]]:
    """Return rows that differ only in their layer grouped together, in the order of each group's first row."""
    groups: dict[tuple[object, ...], list[MatrixRow]] = {}
    for row in rows:
        # A block may have two feed-forward matrices of one role and shape (gate and up); their names tell them apart.
        name = row.path.rsplit(".", 1)[-1] if row.role.startswith("ffn") else ""
        key = (row.kind, row.role, name, row.init, row.shape, row.state, row.frozen, row.trainable)
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def _layer_ranges(layers: list[str]) -> str:
    """Return layer numbers as ranges, such as '0-3, 5'."""
    if not all(layer.isdigit() for layer in layers):
        return ", ".join(dict.fromkeys(layers))
    ranges = []
    # Along a run of consecutive numbers the difference between number and index stays the same.
    for _, run in groupby(enumerate(int(layer) for layer in layers), key=lambda pair: pair[1] - pair[0]):
        numbers = [number for _, number in run]
        ranges.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(ranges)
