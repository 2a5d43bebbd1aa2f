"""Benchmarks as text tables for the terminal."""

from __future__ import annotations

import textwrap

from ..base.text import WIDTH, plain_table, plain_text
from ..runs.schema import BenchRows, DecodeBench, StepBench

# Columns of names, which begin at the left.
_NAMES = ("arm", "kernel", "kernels, ms")
# Of a profiled arm, how many kernels are listed, and how much of their names.
_LONGEST_KERNELS, _NAME_WIDTH = 8, 60


def bench_table(rows: list[StepBench]) -> str:
    """Return the table of a benchmark of steps, one line per arm; if batch sizes differ, with a ratio per example."""
    title = f"whole optimiser steps, {rows[0].rounds} interleaved rounds"
    unequal = any(row.warning for row in rows)
    return _table(title, [_bench_cells(row, unequal) for row in rows])


def _bench_cells(row: StepBench, unequal: bool) -> dict[str, str]:
    """Return an arm's cells by the heading of their column, which is broken where that keeps the table narrow."""
    step, ratio = {"step\nms": f"{row.step_ms:.2f}"}, _with_interval(row.ratio, row.ratio_95)
    mfu = {"MFU": f"{row.mfu:.1%}" if row.mfu else "-"}
    memory = f"{row.peak_memory / 1e6:,.0f}" if row.peak_memory else "-"
    costs = {
        "FLOP\nbound": f"{row.flop_bound:.3f}",
        "train-\nable": f"{row.trainable / 1e6:,.2f} M",
        "memory\nMB": memory,
    }
    if not unequal:
        return {"arm": row.arm, **step, "tokens/s": f"{row.tokens_per_second:,.0f}", **mfu, "ratio": ratio, **costs}
    per_example = _with_interval(row.ratio_per_example, row.ratio_per_example_95)
    ratios = {"ratio of\nsteps": ratio, "ratio per\nexample": per_example}
    return {"arm": row.arm, "batch": str(row.batch_size), **step, **mfu, **ratios, **costs}


def decoding_table(rows: list[DecodeBench]) -> str:
    """Return the table of a benchmark of generation in one setting, one line per arm."""
    first = rows[0]
    title = f"one token after {first.context:,}, batches of {first.batch_size}, {first.rounds} interleaved rounds"
    kernels = any(row.kernel for row in rows)
    return _table(title + (", compiled" if first.compiled else ""), [_decoding_cells(row, kernels) for row in rows])


def _decoding_cells(row: DecodeBench, kernels: bool) -> dict[str, str]:
    """Return an arm's cells by the heading of their column; an arm that has no time says why in the last."""
    per_layer = row.cache_bytes_per_token / (row.layers or 1)
    cache = {"cache\nbytes": f"{per_layer:,.0f}", "cache\nratio": f"{row.cache_ratio:.3f}"}
    prefill = "-" if row.prefill_ms is None else f"{row.prefill_ms:,.1f}"
    time = "failed" if row.token_ms is None else f"{row.token_ms:.3f}"
    rate = "-" if row.tokens_per_second is None else f"{row.tokens_per_second:,.1f}"
    # There is room for one of the two: a token's time gives the rate too.
    named = {"kernel": row.kernel or "-", "token\nms": time} if kernels else {"token\nms": time, "tokens/s": rate}
    ratio = "-" if row.ratio is None else _with_interval(row.ratio, row.ratio_95)
    return {"arm": row.arm, **named, "ratio": ratio, **cache, f"prefill\nof {row.prefill_rows}, ms": prefill}


def kernel_tables(rows: BenchRows) -> list[str]:
    """Return where the time of profiled arms goes: the kinds of kernels side by side, then each arm's longest ones."""
    profiled = [row for row in rows if row.kernels]
    if not profiled:
        return []
    kinds = dict.fromkeys(kernel.kind for row in profiled for kernel in row.kernels)
    lines = []
    for kind in kinds:
        of_kind = [[kernel for kernel in row.kernels if kernel.kind == kind] for row in profiled]
        times = {row.arm: sum(kernel.ms for kernel in own) for row, own in zip(profiled, of_kind, strict=True)}
        lines.append({"kernels, ms": kind} | {arm: f"{ms:.3f}" for arm, ms in times.items()})
    sums = {row.arm: f"{sum(kernel.ms for kernel in row.kernels):.3f}" for row in profiled}
    tables = [_table("where the time goes", [*lines, {"kernels, ms": "all kernels"} | sums])]
    for row in profiled:
        longest = [
            {"kernel": kernel.name[:_NAME_WIDTH], "ms": f"{kernel.ms:.3f}", "launches": f"{kernel.launches:g}"}
            for kernel in row.kernels[:_LONGEST_KERNELS]
        ]
        tables.append(_table(f"the longest kernels of {row.arm}", longest))
    return tables


def _table(title: str, lines: list[dict[str, str]]) -> str:
    """Return lines as a table below a title, without the columns in which no line has anything."""
    table = plain_table()
    names = [name for name in lines[0] if any(cells.get(name, "-") != "-" for cells in lines)]
    for name in names:
        table.add_column(name, justify="left" if name in _NAMES else "right", no_wrap=True)
    for cells in lines:
        table.add_row(*(cells[name] for name in names))
    return plain_text(table, title)


def render_bench(rows: BenchRows) -> str:
    """Return a benchmark's tables as text, one for each setting, with a line that says how its ratios are computed."""
    decoding = [row for row in rows if isinstance(row, DecodeBench)]
    settings = dict.fromkeys((row.batch_size, row.context) for row in decoding)
    tables = []
    for setting in settings:
        own = [row for row in decoding if (row.batch_size, row.context) == setting]
        tables += [decoding_table(own), *kernel_tables(own)]
    steps = [row for row in rows if isinstance(row, StepBench)]
    tables = tables or [bench_table(steps), *kernel_tables(steps)]
    notes = [
        f"ratio: an arm's median time over that of {rows[0].arm} in the same round, averaged over the rounds. The "
        "times are medians over all rounds; their ratio may differ, since the machine's speed changes between rounds"
    ]
    if decoding:
        notes.append("cache: bytes of one token in one layer")
    if any(row.prefill_rows != row.batch_size for row in decoding):
        notes.append("prefill: reading the context, of as many texts as the heading says; the others have copies")
    return "\n\n".join([*tables, "\n".join(textwrap.fill(note, WIDTH) for note in notes)])


def _with_interval(ratio: float, half_interval: float | None) -> str:
    """Return a ratio with half of its interval; a benchmark of one round has none."""
    return f"{ratio:.3f}" if half_interval is None else f"{ratio:.3f} ± {half_interval:.3f}"
