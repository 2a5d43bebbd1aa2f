"""Reports as text tables for the terminal."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from itertools import groupby
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from ..method.seal import FreezeReport, Row


def render(table: Table, width: int = 118) -> str:
    """A rich table as plain text."""
    console = Console(file=io.StringIO(), width=width, color_system=None, legacy_windows=False)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().rstrip("\n")


def render_report(report: FreezeReport) -> str:
    """A freeze report: one line per matrix, like layers together, then the totals."""
    return render(report_table(report)) + "\n" + totals(report)


def report_table(report: FreezeReport) -> Table:
    seed = "" if report.seed is None else f", seed {report.seed}"
    table = Table(title=f"{report.model}: {report.method}{seed}", title_justify="left")
    for name in ("attention", "layers", "matrix", "init", "shape", "state"):
        table.add_column(name)
    for name in ("frozen", "trainable", "orthogonality error"):
        table.add_column(name, justify="right")
    for rows in _alike(report.rows):
        first = rows[0]
        errors = [row.orthogonality_error for row in rows if row.orthogonality_error is not None]
        table.add_row(
            first.kind,
            _span([row.layer for row in rows]),
            first.role,
            first.init,
            " x ".join(str(size) for size in first.shape) or "-",
            first.state,
            f"{sum(row.frozen for row in rows):,}",
            f"{sum(row.trainable for row in rows):,}",
            f"{max(errors):.1e}" if errors else "-",
        )
    listed_frozen = sum(row.frozen for row in report.rows)
    listed_trainable = sum(row.trainable for row in report.rows)
    rest_frozen, rest_trainable = report.frozen - listed_frozen, report.trainable - listed_trainable
    if report.rest != "trained" and report.head:
        head_frozen = report.head - report.head_trainable
        table.add_row("", "", "head", "", "", "", f"{head_frozen:,}", f"{report.head_trainable:,}", "-")
        rest_frozen, rest_trainable = rest_frozen - head_frozen, rest_trainable - report.head_trainable
    table.add_row("", "", "the rest", "", "", "", f"{rest_frozen:,}", f"{rest_trainable:,}", "-", end_section=True)
    table.add_row("total", "", "", "", "", "", f"{report.frozen:,}", f"{report.trainable:,}", "")
    return table


def totals(report: FreezeReport) -> str:
    said = (
        f"{report.total:,} parameters, {report.trainable:,} trainable; {report.frozen:,} frozen: "
        f"{report.frozen_share:.1%} of the model, {report.frozen_share_of_blocks:.1%} of its blocks. "
        f"Buffers: {report.buffers:,}."
    )
    if report.rest == "trained" and not report.adapter:
        return said
    adapters = f"{report.adapter_trainable:,} in adapters ({report.adapter}), " if report.adapter else ""
    elsewhere = report.trainable - report.adapter_trainable - report.head_trainable
    return f"{said}\nWhat trains: {adapters}{report.head_trainable:,} in the head, {elsewhere:,} elsewhere."


def bench_table(rows: list[dict[str, Any]]) -> Table:
    """A benchmark: one line per arm. Where steps differ in size, with the ratio per example."""
    table = Table(title=f"whole optimiser steps, {rows[0]['rounds']} interleaved rounds", title_justify="left")
    unequal = any(row["warning"] for row in rows)
    cells = [_bench_cells(row, unequal) for row in rows]
    for name in cells[0]:
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for row in cells:
        table.add_row(*row.values())
    return table


def _bench_cells(row: dict[str, Any], unequal: bool) -> dict[str, str]:
    mfu = f"{row['mfu']:.1%}" if row["mfu"] else "-"
    ratio = _with_spread(row["ratio"], row["ratio_95"])
    ends = {
        "FLOP\nbound" if unequal else "FLOP bound": f"{row['flop_bound']:.3f}",
        "trainable": f"{row['trainable']:,}",
        "peak\nmemory, MB" if unequal else "peak memory, MB": (
            f"{row['peak_memory'] / 1e6:,.0f}" if row["peak_memory"] else "-"
        ),
    }
    step = {"step, ms": f"{row['step_ms']:.2f}"}
    if not unequal:
        speed = {"tokens/s": f"{row['tokens_per_second']:,.0f}", "MFU": mfu}
        return {"arm": row["arm"], **step, **speed, "ratio": ratio, **ends}
    per_example = _with_spread(row["ratio_per_example"], row["ratio_per_example_95"])
    ratios = {"ratio of\nsteps": ratio, "ratio per\nexample": per_example}
    return {"arm": row["arm"], "batch": str(row["batch_size"]), **step, "MFU": mfu, **ratios, **ends}


def decoding_table(rows: list[dict[str, Any]]) -> Table:
    """A benchmark of generation: one line per arm."""
    first = rows[0]
    title = (
        f"one token after {first['context']:,}, batches of {first['batch_size']}, {first['rounds']} interleaved rounds"
        + (", compiled" if first["compiled"] else "")
    )
    table = Table(title=title, title_justify="left")
    for name in ("arm", "token, ms", "tokens/s", "ratio", "cache, bytes a token", "cache ratio"):
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row["arm"],
            f"{row['token_ms']:.2f}",
            f"{row['tokens_per_second']:,.1f}",
            _with_spread(row["ratio"], row["ratio_95"]),
            f"{row['cache_bytes_per_token']:,.0f}",
            f"{row['cache_ratio']:.3f}",
        )
    return table


def render_bench(table: Table, against: str) -> str:
    """A benchmark's table, and below it how its ratios are made and why the times beside them may give others."""
    return (
        f"{render(table)}\n"
        f"ratio: of the medians to {against}'s within a round, averaged over the rounds; the times above, medians over "
        "all rounds, may give another, since the machine's speed changes between rounds"
    )


def _with_spread(ratio: float, half: float) -> str:
    """A ratio with half of its interval; one round has none."""
    return f"{ratio:.3f} ± {half:.3f}" if math.isfinite(half) else f"{ratio:.3f}"


def _alike(rows: Iterable[Row]) -> list[list[Row]]:
    """Rows that differ only in their layer, together, in the order of their first layer and place in the block."""

    def key(row: Row) -> tuple[object, ...]:
        name = row.path.rsplit(".", 1)[-1] if row.role.startswith("ffn") else ""
        return (row.kind, row.role, name, row.init, row.shape, row.state, row.frozen, row.trainable)

    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


def _span(layers: list[str]) -> str:
    """Layer numbers as ranges: 0-3, 5."""
    if not all(layer.isdigit() for layer in layers):
        return ", ".join(dict.fromkeys(layers))
    runs = groupby(enumerate(int(layer) for layer in layers), key=lambda pair: pair[1] - pair[0])
    spans = []
    for _, run in runs:
        numbers = [number for _, number in run]
        spans.append(str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}")
    return ", ".join(spans)
