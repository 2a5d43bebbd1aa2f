"""Benchmarks as text tables for the terminal."""

from __future__ import annotations

from rich.table import Table

from ..base.text import plain_text
from ..runs.schema import BenchRows, DecodeBench, StepBench

# Columns of names, which begin at the left.
_NAMES = ("arm", "kernel", "kernels, ms")
# Of a profiled arm, how many kernels are listed, and how much of their names.
_LONGEST_KERNELS, _NAME_WIDTH = 8, 60


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
    """Return the table of a benchmark of generation in one setting, one line per arm."""
    first = rows[0]
    title = f"one token after {first.context:,}, batches of {first.batch_size}, {first.rounds} interleaved rounds"
    kernels = any(row.kernel for row in rows)
    return _table(title + (", compiled" if first.compiled else ""), [_decoding_cells(row, kernels) for row in rows])


def _decoding_cells(row: DecodeBench, kernels: bool) -> dict[str, str]:
    """Return an arm's cells by the heading of their column; an arm that has no time says why in the last."""
    kernel = {"kernel": row.kernel or "-"} if kernels else {}
    per_layer = row.cache_bytes_per_token / (row.layers or 1)
    cache = {"cache, bytes a\ntoken and layer": f"{per_layer:,.0f}", "cache\nratio": f"{row.cache_ratio:.3f}"}
    prefill = "-" if row.prefill_ms is None else f"{row.prefill_ms:,.1f}"
    if row.token_ms is None or row.tokens_per_second is None:
        speed = {"token, ms": "failed", "tokens/s": "-"}
    else:
        speed = {"token, ms": f"{row.token_ms:.3f}", "tokens/s": f"{row.tokens_per_second:,.1f}"}
    ratio = "-" if row.ratio is None else _with_interval(row.ratio, row.ratio_95)
    return {"arm": row.arm, **kernel, **speed, "ratio": ratio, **cache, f"prefill of\n{row.prefill_rows}, ms": prefill}


def kernel_tables(rows: BenchRows) -> list[Table]:
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


def _table(title: str, lines: list[dict[str, str]]) -> Table:
    table = Table(title=title, title_justify="left")
    for name in lines[0]:
        table.add_column(name, justify="left" if name in _NAMES else "right", no_wrap=True)
    for cells in lines:
        table.add_row(*cells.values())
    return table


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
    if any(row.prefill_rows != row.batch_size for row in decoding):
        notes.insert(0, "prefill: reading the context, of as many texts as the heading says; the others have copies")
    return "\n".join([*map(plain_text, tables), *notes])


def _with_interval(ratio: float, half_interval: float | None) -> str:
    """Return a ratio with half of its interval; a benchmark of one round has none."""
    return f"{ratio:.3f}" if half_interval is None else f"{ratio:.3f} ± {half_interval:.3f}"
