"""What the training step was to reach, what records of benchmarks say of it, and what their kernels say of the rest."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from ..analysis.run import Bench
from ..runs.schema import StepBench
from .bench_command import asked_for, size_of
from .document import Block, Bullets, Cell, Heading, Paragraph, Table

# The names of kinds of kernels, and of the arms, in the records.
_PRODUCTS, _ATTENTION = "matrix products", "attention"
_NANOGPT, _HF_TRAINER = "nanogpt", "hf-trainer"
_SETTING = "model, batch × length, vocabulary"
# What was measured for these steps and is not in them; the commits say by how much.
_TRIED = (
    "One product for Q, K and V made the baseline's step shorter, but that of frozen Q and K longer: there the joined "
    "gradient costs more than it saves (commits ce9be0e and 911e225).",
    "A copy of the frozen weights in bf16 was not made: it would save only their casts, which are among the shortest "
    "kernels of a step.",
    "The logits of the head in much smaller parts than 1 GiB would need less memory, but take longer. Parts of 1 GiB "
    "take no longer than all logits at once, and the memory in the tables above is measured with them.",
)


@dataclass(frozen=True)
class Measured:
    """A figure of one record with half of its 95 % interval."""

    value: float
    half: float = 0.0

    def overlaps(self, other: Measured) -> bool:
        """Return True when the two intervals have a value in common."""
        return abs(self.value - other.value) <= self.half + other.half


@dataclass(frozen=True)
class Aim:
    """What was wanted of an arm in batches of some size: at least a value or, with `at_most`, not more than that.

    arm             the arm's name; None for every arm that needs less arithmetic than the first one
    size            batch and length; None for every size
    what            what is measured, in the words of the table; `measure` takes it from the arm's row, if it is there
    unit, decimals  how the value is written: times, % or ms
    """

    arm: str | None
    size: tuple[int, int] | None
    what: str
    measure: Callable[[StepBench], Measured | None]
    wanted: float
    unit: str = ""
    decimals: int = 3
    vocabulary: int | None = None
    at_most: bool = False

    def of(self, bench: Bench) -> list[StepBench]:
        """Return the rows of a record that the aim is about."""
        size, asked = size_of(bench.steps[0]), asked_for(bench.steps[0])
        if self.size not in (None, (size.batch, size.length)) or self.vocabulary not in (None, asked.vocabulary):
            return []
        return [row for row in bench.steps if row.arm == self.arm or (self.arm is None and row.flop_bound < 1)]

    def verdict(self, measured: Sequence[Measured]) -> Cell:
        """Return met if every whole interval lies at the aim or beyond, missed if no mean does, else open."""
        sign = -1 if self.at_most else 1
        beyond = [sign * (figure.value - self.wanted) for figure in measured]
        if all(distance >= figure.half for distance, figure in zip(beyond, measured, strict=True)):
            return Cell("met", tone="good")
        return Cell("open", tone="open") if any(distance >= 0 for distance in beyond) else Cell("missed", tone="bad")

    def text(self, figure: Measured) -> str:
        """Return a figure as the table shows it."""
        half = f" ± {figure.half:.{self.decimals}f}" if figure.half else ""
        return f"{figure.value:.{self.decimals}f}{half}{self.unit}".replace("-", "−")


# A figure, and the record that it is from.
_Figure = tuple[Measured, Bench]


def _times(row: StepBench) -> Measured:
    return Measured(row.ratio_per_example, row.ratio_per_example_95 or 0.0)


def _share_of_saving(row: StepBench) -> Measured:
    """Return the saved time as a percentage of what the saved arithmetic would give."""
    ratio, bound = _times(row), 1 - row.flop_bound
    return Measured(100 * (1 - ratio.value) / bound, 100 * ratio.half / bound)


def _mfu(row: StepBench) -> Measured | None:
    return None if row.mfu is None else Measured(100 * row.mfu)


def _milliseconds(row: StepBench) -> Measured:
    return Measured(row.step_ms)


_MFU = Aim("baseline", (64, 512), "MFU", _mfu, 40, " %", 1, vocabulary=50257)
_SAVING = Aim(None, None, "share of the saving that its FLOPs allow", _share_of_saving, 80, " %", 0)
_AIMS = (
    Aim(_NANOGPT, (64, 512), "times the baseline's step", _times, 1.1),
    Aim(_NANOGPT, (16, 512), "times the baseline's step", _times, 1.25),
    Aim(_HF_TRAINER, (16, 512), "times the baseline's step", _times, 2.2),
    Aim(_HF_TRAINER, (16, 128), "times the baseline's step", _times, 2.2),
    Aim("baseline", (16, 128), "step", _milliseconds, 10, " ms", 2, at_most=True),
    _MFU,
    _SAVING,
)


def aims(benches: Sequence[Bench]) -> list[Block]:
    """Return the table of aims, and what the kernels of profiled records say of those that are missed."""
    profiled = [bench for bench in benches if bench.steps[0].kernels]
    return [
        Paragraph(
            "What a training step was to reach, and what was measured: by a record of the first section, and after it "
            "by one of the second, where both measured it. Met says that every record's whole interval is at the aim "
            "or beyond, missed that no record's mean is, open anything else."
        ),
        *_figures(benches),
        *_saved(profiled),
        *_beside_nanogpt(profiled),
        *_use_of_the_peak(profiled),
        Heading("Tried and left out", 3, "aims-tried"),
        Bullets([Cell(text) for text in _TRIED]),
    ]


def _figures(benches: Sequence[Bench]) -> list[Block]:
    """Return the aims with their figures, and how far those differ that two records measured."""
    table = Table("aims", ["arm", _SETTING, "what", "aim", "measured", "verdict"])
    pairs: list[tuple[_Figure, _Figure]] = []
    for aim in _AIMS:
        figures: dict[tuple[str, str], list[_Figure]] = defaultdict(list)
        for bench in benches:
            for row in aim.of(bench):
                measured = aim.measure(row)
                if measured is not None:
                    figures[row.arm, _setting(bench)].append((measured, bench))
        for (arm, setting), found in figures.items():
            wanted = f"at {'most' if aim.at_most else 'least'} {aim.wanted:g}{aim.unit}"
            every = [measured for measured, _ in found]
            cells = setting, aim.what, wanted, "; ".join(map(aim.text, every)), aim.verdict(every)
            table.add(Cell(arm, code=True), *cells)
            pairs += combinations([figure for figure in found if figure[0].half], 2)
    return [table, *_spread(pairs)]


def _spread(pairs: Sequence[tuple[_Figure, _Figure]]) -> list[Block]:
    """Return how many figures differ between two records by more than their intervals, and at which clocks."""
    apart = [pair for pair in pairs if not pair[0][0].overlaps(pair[1][0])]
    if not apart:
        return []
    settings = "; ".join(sorted({_setting(bench) for pair in apart for _, bench in pair}))
    clocks = sorted({clock for pair in apart for _, bench in pair if (clock := _clock(bench)) is not None})
    read = f", which at the end of these records was {clocks[0]:,} to {clocks[-1]:,} MHz" if len(clocks) > 1 else ""
    return [
        Paragraph(
            f"Of {len(pairs)} figures that have an interval in two records, {len(apart)} differ by more than both "
            f"intervals ({settings}). An interval covers the rounds of one session, and not another session, in which "
            f"the GPU may have another clock{read}."
        )
    ]


def _saved(profiled: Sequence[Bench]) -> list[Block]:
    """Return how much time the products of arms that save arithmetic lose, beside what the aim asks of them."""
    columns = ["arm", _SETTING, "arithmetic saved", "products' time saved", "asked of the products"]
    columns += ["kernels' time saved", "step's time saved"]
    table = Table("saved", columns, numeric=tuple(range(2, len(columns))))
    shares, more = [], 0
    for bench in profiled:
        first = bench.steps[0]
        step, products, kernels = first.step_ms, _ms(first, _PRODUCTS), _ms(first)
        for row in _SAVING.of(bench) if products else []:
            arithmetic, lost = 1 - row.flop_bound, 1 - _ms(row, _PRODUCTS) / products
            asked = _SAVING.wanted / 100 * arithmetic * step / products
            figures = (arithmetic, lost, asked, (kernels - _ms(row)) / step, 1 - row.ratio_per_example)
            table.add(Cell(row.arm, code=True), _setting(bench), *(f"{100 * figure:.1f} %" for figure in figures))
            shares.append(products / step)
            more += lost > arithmetic
    if not table.rows:
        return []
    return [
        Heading("What saved arithmetic saves", 3, "aims-saved"),
        table,
        Paragraph(
            f"A product that is not needed takes its time with it: in {more} of {len(table.rows)} rows the products "
            "lose a larger share of their time than the step loses of its arithmetic. But they are only "
            f"{100 * min(shares):.0f} to {100 * max(shares):.0f} % of the baseline's step. The rest, attention, norms, "
            "the loss, sums, copies and the optimiser, reads and writes nearly the same tensors in every arm. Asked of "
            "the products is the share of their time that would have to go for the aim if nothing else became shorter. "
            "Where they lose less than that, the step's other kernels are why the aim is missed; where they lose more "
            "and the step does not show it, the spread between records is."
        ),
    ]


def _beside_nanogpt(profiled: Sequence[Bench]) -> list[Block]:
    """Return how much longer nanoGPT's kernels of each kind take than the baseline's."""
    columns = [_SETTING, "all kernels", "products", "attention", "other kernels", "no kernel", "without gaps here"]
    table = Table("beside-nanogpt", columns, numeric=tuple(range(1, len(columns))))
    for bench in profiled:
        first = bench.steps[0]
        for row in bench.steps:
            if row.arm == _NANOGPT:
                pairs = [(_ms(row), _ms(first))]
                pairs += [(_ms(row, kind), _ms(first, kind)) for kind in (_PRODUCTS, _ATTENTION)]
                pairs += [(_other(row), _other(first)), (_idle(row), _idle(first)), (row.step_ms, _ms(first))]
                table.add(_setting(bench), *(f"{its / own:.3f}" if own > 0 else "–" for its, own in pairs))
    if not table.rows:
        return []
    return [
        Heading("nanogpt's time as a multiple of the baseline's", 3, "aims-nanogpt"),
        table,
        Paragraph(
            "Products and attention are the same arithmetic in both. The products take longer here, since Q, K and V "
            "are three of them and one there; with the larger vocabulary those of the head do too. What is ahead are "
            "the other kernels, above all the head's loss, which leaves the gradient where the logits were, and the "
            "time in which no kernel runs, since a recorded step is launched at once. The last column has nanogpt's "
            "step over the baseline's kernels: the ratio if these followed each other without a gap. Where it is below "
            "the aim, only shorter kernels could reach it. In small batches nearly all of the lead is time in which "
            "nanogpt's host launches kernels, so with a faster host it is smaller."
        ),
    ]


def _use_of_the_peak(profiled: Sequence[Bench]) -> list[Block]:
    """Return what the aimed-at MFU would ask of the step, for every record that has its kernels."""
    blocks: list[Block] = []
    for bench in profiled:
        for row in _MFU.of(bench):
            counted = _ms(row, _PRODUCTS) + _ms(row, _ATTENTION)
            if not row.mfu or not counted:
                continue
            needed = row.step_ms * row.mfu / (_MFU.wanted / 100)
            used = 100 * row.mfu * row.step_ms / counted
            text = (
                f"An MFU of {_MFU.wanted:g} % at {_setting(bench)} would be a step of {needed:.2f} ms. The kernels "
                f"alone take {_ms(row):.2f} ms: {counted:.2f} ms of products and attention, which use {used:.0f} % of "
                f"the peak, and {_other(row):.2f} ms of others, which do none of the arithmetic that is counted."
            )
            blocks.append(Paragraph(text))
    return [Heading("MFU", 3, "aims-mfu"), *blocks] if blocks else []


def _ms(row: StepBench, kind: str | None = None) -> float:
    """Return the milliseconds of a step's kernels, of one kind or all."""
    return sum(kernel.ms for kernel in row.kernels if kind in (None, kernel.kind))


def _other(row: StepBench) -> float:
    return _ms(row) - _ms(row, _PRODUCTS) - _ms(row, _ATTENTION)


def _idle(row: StepBench) -> float:
    return row.step_ms - _ms(row)


def _setting(bench: Bench) -> str:
    """Return a record's model, batch, length and vocabulary in short."""
    size, asked = size_of(bench.steps[0]), asked_for(bench.steps[0])
    vocabulary = "" if asked.vocabulary is None else f", {asked.vocabulary:,}"
    return f"{asked.model}, {size.batch} × {size.length:,}{vocabulary}"


def _clock(bench: Bench) -> int | None:
    origin = bench.steps[0].origin
    return None if origin is None else origin.clock_mhz
