"""Write docs/performance.md: how long steps and tokens take, beside what, and how that grows, from benchmark records.

Every number comes from what `oelm bench --json` printed; `results/speed.sh` makes the records. Where one is absent the
page says so.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from os import PathLike
from pathlib import Path

from .. import __version__
from ..analysis import AnalysisError
from ..analysis.run import Bench
from ..base.files import write_text
from ..runs.schema import DecodeBench, StepBench, parse_bench
from .aims import aims
from .bench_command import Asked, Size, asked_for, size_of
from .document import Block, Bullets, Cell, Document, Heading, Paragraph, Table
from .markdown import to_markdown
from .sections import relative

# Which records a section is made of, by the names of their files.
_PEERS, _KERNELS, _GROWTH = ("speed-*",), ("profile-*",), ("grow-*",)
_STEPS, _DECODING = ("forms-step*", "step-*"), ("forms-decode*", "decode-*")
_NONE = "–"


# Each size with its name in a sentence and in the heading of a column.
_AXES = {
    "batch": ("the batch", "sequences"),
    "length": ("the length of the sequences", "tokens"),
    "width": ("the model's width", "width"),
    "layers": ("the number of layers", "layers"),
}


def write_performance(folders: Sequence[str | PathLike[str]], out: str | PathLike[str]) -> Path:
    """Write the page from the records in the folders; of two records of one name, that in the first folder counts."""
    path = Path(out)
    write_text(path, to_markdown(performance_document(folders, path.parent)))
    return path


def performance_document(folders: Sequence[str | PathLike[str]], out: Path) -> Document:
    """Return the page; its paths of records are relative to the folder `out`."""
    records = _Records([Path(folder) for folder in folders], out)
    blocks: list[Block] = [
        Paragraph(
            "Each table is one or several runs of oelm bench: whole optimiser steps, or tokens generated, on random "
            "tokens, with the arms of a table interleaved in rounds in one process, so that the machine's changes of "
            "speed meet them all. Times are medians over all rounds. A ratio is an arm's time over the first arm's in "
            "the same round, averaged over the rounds, with half of its 95 % interval."
        ),
        Paragraph(
            "MFU is the share of the device's dense bf16 peak that a step's arithmetic, counted from the model's "
            "shapes, makes use of. Memory is the most that an arm's tensors took at once. The FLOP bound is the ratio "
            "that the saved arithmetic alone would give."
        ),
        *_section("peers", "Beside other tools", records, _PEERS, _peers),
        *_section("kernels", "Where the time of a step goes", records, _KERNELS, _kernels),
        *_section("aims", "What was aimed at, and what is missed", records, (*_PEERS, *_KERNELS), _aims),
        *_section("growth", "How a step's time grows", records, _GROWTH, _growth),
        *_section("steps", "Forms of attention: a training step", records, _STEPS, _form_steps),
        *_section("decoding", "Forms of attention: generation", records, _DECODING, _form_tokens),
    ]
    footer = f"Written by oelm {__version__} from {len(records.used)} records; regenerate it with make results."
    return Document("How fast it is", "en", blocks, footer)


class _Records:
    """The benchmark records in some folders. `used` has the names of those that were asked for."""

    def __init__(self, folders: Sequence[Path], out: Path) -> None:
        self._folders, self._out = folders, out
        self.used: set[str] = set()

    def named(self, patterns: Iterable[str]) -> list[Bench]:
        """Return the records with such names, in the order of the patterns; those without a command are left out."""
        paths: dict[str, Path] = {}
        for pattern in patterns:
            for folder in self._folders:
                for path in sorted(folder.glob(f"{pattern}.json")):
                    paths.setdefault(path.name, path)
        benches = [bench for bench in map(_read, paths.values()) if bench.rows[0].origin is not None]
        self.used |= {bench.path.name for bench in benches}
        return benches

    def origin(self, bench: Bench) -> list[Block]:
        """Return where a record was made, and the command that makes another."""
        made = bench.rows[0].origin
        assert made is not None
        commit = "an unknown commit" if made.git_commit is None else f"commit {made.git_commit[:9]}"
        clock = "" if made.clock_mhz is None else f", at {made.clock_mhz:,} MHz"
        where = f"{relative(bench.path, self._out)}: {made.device}{clock}, torch {made.versions.torch}, {commit}"
        command = re.sub(r"--peer nanogpt=\S+", "--peer nanogpt=CLONE", made.command)
        return [Paragraph(where, tone="muted"), Bullets([Cell(command, code=True)])]


def _read(path: Path) -> Bench:
    try:
        return Bench(path, parse_bench(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        problem = str(error).splitlines()[0]
        raise AnalysisError(f"{path}: not what `oelm bench --json` prints ({problem}); measure it again") from None


def _section(
    anchor: str,
    title: str,
    records: _Records,
    patterns: tuple[str, ...],
    write: Callable[[list[Bench], _Records], list[Block]],
) -> list[Block]:
    benches = records.named(patterns)
    absent: list[Block] = [Paragraph("There is no record of this yet: results/speed.sh makes it.")]
    return [Heading(title, 2, anchor), *(write(benches, records) if benches else absent)]


def _peers(benches: list[Bench], records: _Records) -> list[Block]:
    """Return a table for each record: the arms, and beside them the same model in other tools."""
    blocks: list[Block] = [
        Paragraph(
            "hf-trainer is transformers' Trainer with the plain model of the same size, compiled where the arms are; "
            "nanogpt is the model of a clone of nanoGPT, in a loop like its own. A ratio above one is slower than the "
            "first arm."
        )
    ]
    for bench in benches:
        blocks.append(Heading(_setting(bench), 3, bench.path.stem))
        blocks += [_step_table(bench, "tokens/s"), *records.origin(bench)]
    return blocks


def _step_table(bench: Bench, rate: str) -> Table:
    """Return the arms of a record of steps, with their tokens per second or a token's microseconds."""
    columns = ["arm", "step (ms)", rate, "ratio", "FLOP bound", "MFU", "memory (GB)", "trainable (M)"]
    table = Table(bench.path.stem, columns, numeric=tuple(range(1, len(columns))))
    for row in bench.steps:
        speed = f"{row.tokens_per_second:,.0f}" if rate == "tokens/s" else f"{1e6 / row.tokens_per_second:.3f}"
        table.add(
            Cell(row.arm, code=True),
            f"{row.step_ms:.2f}",
            speed,
            _with_interval(row.ratio_per_example, row.ratio_per_example_95),
            f"{row.flop_bound:.3f}",
            *_use(row),
            f"{row.trainable / 1e6:.1f}",
        )
    return table


def _kernels(benches: list[Bench], records: _Records) -> list[Block]:
    """Return a table for each record: the arms' milliseconds in every kind of kernel, and what is left of a step."""
    blocks: list[Block] = [
        Paragraph(
            "In milliseconds of one step, by torch's profiler; the records hold the kernels one by one. A profiled "
            "kernel may take longer than one that is timed. What is left of a step is the time in which no kernel ran: "
            "the device waited for its host, or for the kernel before."
        )
    ]
    for bench in benches:
        kinds = sorted({kernel.kind for row in bench.steps for kernel in row.kernels})
        columns = ["arm", "step", *kinds, "left", "ratio"]
        table = Table(bench.path.stem, columns, numeric=tuple(range(1, len(columns))))
        for row in bench.steps:
            times = [sum(kernel.ms for kernel in row.kernels if kernel.kind == kind) for kind in kinds]
            ratio = _with_interval(row.ratio_per_example, row.ratio_per_example_95)
            left = row.step_ms - sum(times)
            table.add(
                Cell(row.arm, code=True), f"{row.step_ms:.2f}", *(f"{ms:.2f}" for ms in times), f"{left:.2f}", ratio
            )
        blocks += [Heading(_setting(bench), 3, bench.path.stem), table, *records.origin(bench)]
    return blocks


def _aims(benches: list[Bench], records: _Records) -> list[Block]:
    """Return what the steps were to reach, from records whose origin is above."""
    return aims(benches)


def _growth(benches: list[Bench], records: _Records) -> list[Block]:
    """Return a table for each size that was varied with all others kept, and how the time grows with it."""
    rows = {size_of(row): row for bench in benches for row in bench.steps if _is_first(row, bench)}
    asked = asked_for(benches[0].rows[0])
    blocks: list[Block] = [
        Paragraph(
            f"{_model(asked)}, {_made(asked)}, one size at a time. The last column is what the time is multiplied by "
            "when the size doubles, from the row above: 2 is in proportion, less means that the device was not busy "
            "before."
        )
    ]
    for axis, (name, unit) in _AXES.items():
        along = _along(axis, rows)
        if len(along) < 2:
            blocks.append(Paragraph(f"There is no record of several sizes of {name}: results/speed.sh makes it."))
            continue
        columns = [unit, "step (ms)", "tokens/s", "MFU", "memory (GB)", "when doubled"]
        table = Table(f"grow-{axis}", columns, numeric=tuple(range(len(columns))))
        before: tuple[int, StepBench] | None = None
        for value, row in along:
            doubled = _NONE if before is None else f"{2 ** _exponent([before, (value, row)]):.2f}"
            table.add(f"{value:,}", f"{row.step_ms:.2f}", f"{row.tokens_per_second:,.0f}", *_use(row), doubled)
            before = value, row
        others = _in_words({key: value for key, value in asdict(size_of(along[0][1])).items() if key != axis})
        blocks += [Heading(f"{name[:1].upper()}{name[1:]}", 3, f"growth-{axis}"), table]
        fit = f"Over this range a step's time grows with {name} to the power of {_exponent(along):.2f}"
        blocks.append(Paragraph(f"{fit} (least squares on logarithms). Kept: {others}."))
    blocks.append(Paragraph("These tables are made of:"))
    for bench in benches:
        blocks += records.origin(bench)
    return blocks


def _along(axis: str, rows: dict[Size, StepBench]) -> list[tuple[int, StepBench]]:
    """Return the rows in which only this size differs, by rising size: the largest such set."""
    sets: dict[tuple[tuple[str, int | None], ...], list[tuple[int, StepBench]]] = defaultdict(list)
    for size, row in rows.items():
        others = asdict(size)
        value = others.pop(axis)
        if value is not None:
            sets[tuple(others.items())].append((value, row))
    largest = max(sets.values(), key=lambda entries: len(entries), default=[])
    return sorted(largest, key=lambda entry: entry[0])


def _exponent(along: Sequence[tuple[int, StepBench]]) -> float:
    """Return the exponent of the power law that fits these times best, by least squares on logarithms."""
    sizes = [math.log(value) for value, _ in along]
    times = [math.log(row.step_ms) for _, row in along]
    mean_size, mean_time = sum(sizes) / len(sizes), sum(times) / len(times)
    covariance = sum((size - mean_size) * (time - mean_time) for size, time in zip(sizes, times, strict=True))
    return covariance / sum((size - mean_size) ** 2 for size in sizes)


def _form_steps(benches: list[Bench], records: _Records) -> list[Block]:
    """Return a table of what a training token costs for each record of forms."""
    blocks: list[Block] = [Bullets([Cell("what each form is", folder="attention.md")])]
    for bench in benches:
        blocks.append(Heading(_setting(bench), 3, bench.path.stem))
        blocks += [_step_table(bench, "a token (µs)"), *records.origin(bench)]
    return blocks


def _form_tokens(benches: list[Bench], records: _Records) -> list[Block]:
    """Return what a generated token costs in each form, a column for each batch and context."""
    blocks: list[Block] = [
        Paragraph(
            "A step gives every text of a batch one token; a token's time is that of a step, divided by the batch. In "
            "brackets is the ratio to the first form of the same record. Plain attention uses the fastest kernel there "
            "is for it."
        )
    ]
    generated = {row.arm for bench in benches for row in bench.decoding}
    trained = dict.fromkeys(row.arm for bench in records.named(_STEPS) for row in bench.steps)
    if absent := [arm for arm in trained if arm not in generated]:
        blocks.append(Paragraph(f"There is no record yet of tokens generated with {', '.join(absent)}."))
    groups: dict[tuple[str, str], list[Bench]] = defaultdict(list)
    for bench in benches:
        asked = asked_for(bench.rows[0])
        groups[_model(asked), "compiled, with a token's kernels recorded" if _compiled(bench) else "not compiled"] += [
            bench
        ]
    for number, ((model, compiled), group) in enumerate(groups.items(), start=1):
        blocks.append(Heading(f"{model}, {compiled}", 3, f"decoding-{number}"))
        blocks.append(_token_table(f"decoding-{number}", group))
        for bench in group:
            blocks += records.origin(bench)
    return blocks


def _token_table(name: str, group: list[Bench]) -> Table:
    rows: dict[tuple[str, int, int], DecodeBench] = {}
    for bench in group:
        for row in bench.decoding:
            rows.setdefault((row.arm, row.batch_size, row.context), row)
    settings = sorted({(batch, context) for _, batch, context in rows})
    columns = ["form", "cache (bytes per token and layer)"]
    columns += [f"{batch} × {context:,} (µs)" for batch, context in settings]
    table = Table(name, columns, numeric=tuple(range(1, len(columns))))
    for form in dict.fromkeys(form for form, _, _ in rows):
        own = [rows.get((form, *setting)) for setting in settings]
        cached = next(row for row in own if row is not None)
        cache = f"{cached.cache_bytes_per_token / (cached.layers or 1):,.0f}"
        table.add(Cell(form, code=True), cache, *map(_token_cell, own))
    return table


def _token_cell(row: DecodeBench | None) -> str:
    if row is None or row.token_ms is None:
        return _NONE
    ratio = "" if row.ratio is None else f" ({row.ratio:.2f})"
    return f"{1000 * row.token_ms / row.batch_size:,.2f}{ratio}"


def _compiled(bench: Bench) -> bool:
    return all(row.compiled for row in bench.decoding)


def _is_first(row: StepBench, bench: Bench) -> bool:
    """Return True for the arm that a record begins with, in batches of whatever size."""
    return row.arm.partition("@")[0] == bench.steps[0].arm.partition("@")[0]


def _setting(bench: Bench) -> str:
    """Return in a few words what a record of steps measured."""
    row = bench.steps[0]
    asked, size = asked_for(row), size_of(row)
    vocabulary = "" if asked.vocabulary is None else f", a vocabulary of {asked.vocabulary:,}"
    return f"{_model(asked)}, {size.batch} × {size.length:,}{vocabulary}, {_made(asked)}"


def _model(asked: Asked) -> str:
    shape = [
        f"{value} {word}"
        for word, value in (("wide", asked.count("hidden_size")), ("layers", asked.count("num_hidden_layers")))
        if value is not None and not asked.model.startswith("gpt:")
    ]
    return asked.model + (f" ({', '.join(shape)})" if shape else "")


def _made(asked: Asked) -> str:
    """Return how a command says that steps are launched."""
    compiled = {True: "compiled", False: "not compiled", None: "compiled as by default"}[asked.compiled]
    return f"{compiled}, with steps recorded" if asked.recorded else compiled


def _use(row: StepBench) -> tuple[str, str]:
    """Return a row's MFU and memory."""
    memory = _NONE if row.peak_memory is None else f"{row.peak_memory / 1e9:.2f}"
    return _NONE if row.mfu is None else f"{100 * row.mfu:.1f} %", memory


def _with_interval(ratio: float | None, half: float | None) -> str:
    if ratio is None:
        return _NONE
    return f"{ratio:.3f}" if not half else f"{ratio:.3f} ± {half:.3f}"


def _in_words(sizes: dict[str, int | None]) -> str:
    return ", ".join(f"{name} {value:,}" for name, value in sizes.items() if value is not None)


if __name__ == "__main__":
    import sys

    print(f"wrote {write_performance(sys.argv[2:], sys.argv[1])}")
