"""Draw the READMEs' picture, in English and Chinese: what is frozen in a block, and what that costs in recorded runs.

`make results` runs this: the rows are those of the README's table, and every number comes from the records in results/.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from html import escape
from pathlib import Path

from draw import BOX_HEIGHT, HEAD, MARGIN, ROW, TEXT, Box, arrow, box_lines, rectangle

from oelm.analysis.compare import MARGINS, Comparison
from oelm.errors import AnalysisError
from oelm.report import numbers
from oelm.report.evidence import headline_comparisons
from oelm.report.sentences import short_conclusion
from oelm.report.words import Words, words

ROOT = Path(__file__).parents[2]
FILES = {"en": ROOT / "docs" / "overview.svg", "zh": ROOT / "docs" / "overview.zh.svg"}
WIDTH, HEIGHT, TOP = 1014, 320, 30
# The chart: where its labels, its zero and its figures stand, and how many pixels one percent (or one point) takes.
LABELS, ZERO, FIGURES, PER_UNIT, ROW_HEIGHT = 440, 712, 862, 5.4, 56
TEXTS = {
    "en": {
        "title": "What is frozen, and what it costs",
        "block": "What is frozen",
        "chart": "What it costs, against an equally trained baseline",
        "attention": "attention",
        "output": "output W_o,\nfeed-forward",
        "frozen": "set once, then frozen",
        "trained": "trained as usual",
        "scratch": "GPT from scratch: {arm}",
        "pretrained": "pretrained encoder: {arm}",
        "share": "{share} % of the parameters frozen",
        "cache": "cache × {cache}, time per token × {time}",
        "keys": "point: mean of {seeds} seeds; bar: 95 % interval; further right is worse",
        "margin": "grey: within the target, alike",
    },
    "zh": {
        "title": "冻结了什么，代价多大",
        "block": "冻结了什么",
        "chart": "与同等训练的基线相比的代价",
        "attention": "注意力",
        "output": "输出 W_o、\n前馈层",
        "frozen": "一次性设定后冻结",
        "trained": "照常训练",
        "scratch": "从零训练的 GPT：{arm}",
        "pretrained": "预训练编码器：{arm}",
        "share": "冻结 {share} % 的参数",
        "cache": "缓存 × {cache}，每个词元的时间 × {time}",
        "keys": "圆点：{seeds} 个种子的均值；横条：95 % 区间；越靠右越差",
        "margin": "灰色：在目标以内，视为相当",
    },
}


def block(texts: dict[str, str]) -> dict[str, Box]:
    """Return the boxes on the left."""
    return {
        "q": Box(0, 0, "Query W_q", "frozen"),
        "k": Box(0, 1, "Key W_k", "frozen"),
        "v": Box(0, 2, "Value W_v", "trained"),
        "a": Box(1, 1, texts["attention"]),
        "o": Box(2, 1, texts["output"], "trained"),
    }


@dataclass(frozen=True, kw_only=True)
class Line:
    """A row of the chart: two lines of label, the change and its interval in percent or points, where right is worse.

    `margin` is how far from zero counts as alike.
    """

    label: str
    detail: str
    value: float
    low: float
    high: float
    margin: float
    text: str
    verdict: str
    seeds: int


def rows(language: str) -> list[Line]:
    """Return the rows of the chart, from the comparisons of the README's table."""
    comparisons = headline_comparisons(ROOT / "results" / "questions.yaml")
    return [_line(comparison, words(language)) for _, comparison in comparisons]


def _line(comparison: Comparison, say: Words) -> Line:
    estimate = comparison.change if comparison.measure.log else comparison.difference
    if estimate is None or estimate.low is None or estimate.high is None:
        raise AnalysisError(f"{comparison.arm}: a row of the picture needs an interval")
    sign = 100 if comparison.measure.lower_is_better else -100
    low, high = sorted((sign * estimate.low, sign * estimate.high))
    margin = MARGINS[comparison.measure.name] * (100 if comparison.measure.log else 1)
    texts = TEXTS[say.language]
    return Line(
        label=texts["scratch" if comparison.measure.log else "pretrained"].format(arm=comparison.arm),
        detail=_saving(comparison, texts),
        value=sign * estimate.mean,
        low=low,
        high=high,
        margin=margin,
        text=f"{say(f'm_{comparison.measure.name}')} {numbers.change(comparison, say)}",
        verdict=short_conclusion(comparison, say)[0],
        seeds=comparison.n,
    )


def _saving(comparison: Comparison, texts: dict[str, str]) -> str:
    """Return what the method of a comparison saves: frozen parameters, or memory and time when text is generated."""
    run, _ = comparison.pairs[0]
    if comparison.arm != "identity-key":
        return texts["share"].format(share=f"{100 * run.result.parameters.frozen_share:.1f}")
    arms = json.loads((ROOT / "results" / "bench-h200" / "decode-4096-batch-256-compiled.json").read_text())
    bench = next(arm for arm in arms if arm["arm"] == comparison.arm)
    return texts["cache"].format(cache=f"{bench['cache_ratio']:.2f}", time=f"{bench['ratio']:.2f}")


def svg(language: str) -> str:
    """Return the picture in a language: the block on the left, the chart on the right."""
    texts = TEXTS[language]
    head = HEAD.format(title=texts["title"], width=WIDTH, height=HEIGHT, right=WIDTH - 1, bottom=HEIGHT - 1)
    parts = [head, *_block(texts), *_chart(rows(language), texts)]
    return "\n".join(parts) + "\n</svg>\n"


def _block(texts: dict[str, str]) -> list[str]:
    boxes = block(texts)
    arrows = [arrow(boxes[start], boxes[end]) for start, end in ("qa", "ka", "va", "ao")]
    lines = [*arrows, *(line for box in boxes.values() for line in box_lines(box))]
    out = [_words(MARGIN, TOP - 4, texts["block"], bold=True), f'<g transform="translate(0 {TOP})">', *lines, "</g>"]
    for number, kind in enumerate(("frozen", "trained")):
        y = TOP + MARGIN + 3 * ROW + 28 * number
        out += [rectangle(MARGIN, y, 26, 18, kind), _words(MARGIN + 34, y + 13.5, texts[kind])]
    return out


def _chart(lines: list[Line], texts: dict[str, str]) -> list[str]:
    bottom = TOP + MARGIN + ROW_HEIGHT * len(lines) - 8
    out = [_words(LABELS, TOP - 4, texts["chart"], bold=True)]
    out.append(f'<path d="M {ZERO} {TOP + 8} V {bottom}" stroke="#6b7280" stroke-dasharray="3 3"/>')
    for number, line in enumerate(lines):
        y = TOP + MARGIN + BOX_HEIGHT / 2 + ROW_HEIGHT * number - 4
        out += [_words(LABELS, y - 2, line.label), _words(LABELS, y + 14, line.detail, colour="#4b5563")]
        out.append(_span(y, line.margin, -line.margin, 22, "#e5e7eb"))
        out.append(_span(y, line.high, line.low, 3, "#33558b"))
        out.append(f'<circle cx="{_x(line.value)}" cy="{y}" r="4.5" fill="#33558b"/>')
        out += [_words(FIGURES, y - 2, line.text), _words(FIGURES, y + 14, line.verdict, colour="#4b5563")]
    seeds = ", ".join(str(count) for count in sorted({line.seeds for line in lines}))
    keys = (texts["keys"].format(seeds=seeds), texts["margin"])
    return [*out, *(_words(LABELS, bottom + 20 + 16 * n, text, colour="#4b5563") for n, text in enumerate(keys))]


def _x(value: float) -> float:
    return round(ZERO + PER_UNIT * value, 1)


def _span(y: float, high: float, low: float, height: float, colour: str) -> str:
    width = round(_x(high) - _x(low), 1)
    return f'<rect x="{_x(low)}" y="{y - height / 2}" width="{width}" height="{height}" fill="{colour}"/>'


def _words(x: float, y: float, text: str, bold: bool = False, colour: str = "") -> str:
    line = TEXT.format(x=x, y=y, anchor="start", text=escape(text))
    attributes = (' font-weight="bold"' if bold else "") + (f' fill="{colour}"' if colour else "")
    return line.replace("<text", f"<text{attributes}", 1)


if __name__ == "__main__":
    for language, file in FILES.items():
        file.write_text(svg(language), encoding="utf-8")
        print(f"wrote {file}")
