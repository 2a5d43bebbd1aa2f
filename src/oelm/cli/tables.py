"""Reports as text tables for the terminal."""

from __future__ import annotations

import math
from typing import Any

from rich.table import Table

from ..base.text import plain_text


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
        f"{plain_text(table)}\n"
        f"ratio: of the medians to {against}'s within a round, averaged over the rounds; the times above, medians over "
        "all rounds, may give another, since the machine's speed changes between rounds"
    )


def _with_spread(ratio: float, half: float) -> str:
    """A ratio with half of its interval; one round has none."""
    return f"{ratio:.3f} ± {half:.3f}" if math.isfinite(half) else f"{ratio:.3f}"
