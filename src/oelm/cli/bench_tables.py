"""Benchmarks as text tables for the terminal."""

from __future__ import annotations

from rich.table import Table

from ..base.text import plain_text
from ..runs.schema import DecodeBench, StepBench


def bench_table(rows: list[StepBench]) -> Table:
    """Return the table of a benchmark of steps, one line per arm; if batch sizes differ, with a ratio per example."""
    title = f"whole optimiser steps, {rows[0].rounds} interleaved rounds"
    unequal = any(row.warning for row in rows)
    return _table(title, [_bench_cells(row, unequal) for row in rows])


def _bench_cells(row: StepBench, unequal: bool) -> dict[str, str]:
    """Return an arm's cells by the heading of their column."""
    mfu = f"{row.mfu:.1%}" if row.mfu else "-"
    ratio = _with_interval(row.ratio, row.ratio_95)
    memory = f"{row.peak_memory / 1e6:,.0f}" if row.peak_memory else "-"
    step = {"step, ms": f"{row.step_ms:.2f}"}
    bound, trainable = f"{row.flop_bound:.3f}", f"{row.trainable:,}"
    if not unequal:
        speed = {"tokens/s": f"{row.tokens_per_second:,.0f}", "MFU": mfu, "ratio": ratio}
        last_columns = {"FLOP bound": bound, "trainable": trainable, "peak memory, MB": memory}
        return {"arm": row.arm, **step, **speed, **last_columns}
    # With two more columns, long headings are broken so that a table still fits a terminal.
    per_example = _with_interval(row.ratio_per_example, row.ratio_per_example_95)
    ratios = {"ratio of\nsteps": ratio, "ratio per\nexample": per_example}
    last_columns = {"FLOP\nbound": bound, "trainable": trainable, "peak\nmemory, MB": memory}
    return {"arm": row.arm, "batch": str(row.batch_size), **step, "MFU": mfu, **ratios, **last_columns}


def decoding_table(rows: list[DecodeBench]) -> Table:
    """Return the table of a benchmark of generation, one line per arm."""
    first = rows[0]
    title = f"one token after {first.context:,}, batches of {first.batch_size}, {first.rounds} interleaved rounds"
    return _table(title + (", compiled" if first.compiled else ""), [_decoding_cells(row) for row in rows])


def _decoding_cells(row: DecodeBench) -> dict[str, str]:
    speed = {"token, ms": f"{row.token_ms:.2f}", "tokens/s": f"{row.tokens_per_second:,.1f}"}
    cache = {"cache, bytes a token": f"{row.cache_bytes_per_token:,.0f}", "cache ratio": f"{row.cache_ratio:.3f}"}
    return {"arm": row.arm, **speed, "ratio": _with_interval(row.ratio, row.ratio_95), **cache}


def _table(title: str, lines: list[dict[str, str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in lines[0]:
        table.add_column(name, justify="left" if name == "arm" else "right", no_wrap=True)
    for cells in lines:
        table.add_row(*cells.values())
    return table


def render_bench(table: Table, reference: str) -> str:
    """Return a benchmark's table as text, with a line that says how its ratios are computed."""
    return (
        f"{plain_text(table)}\n"
        f"ratio: an arm's median time over that of {reference} in the same round, averaged over the rounds. The times "
        "are medians over all rounds; their ratio may differ, since the machine's speed changes between rounds"
    )


def _with_interval(ratio: float, half_interval: float | None) -> str:
    """Return a ratio with half of its interval; a benchmark of one round has none."""
    return f"{ratio:.3f}" if half_interval is None else f"{ratio:.3f} ± {half_interval:.3f}"
