"""Draw the pictures of docs/attention.md: `python docs/attention/draw.py` writes one SVG per form beside this file.

A picture is a grid of boxes joined from left to right. Every picture has its own white background, so that it reads the
same on a light and on a dark page, and the kinds of box differ in border and pattern too, not in colour alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from itertools import pairwise
from pathlib import Path

COLUMN, ROW, BOX_WIDTH, BOX_HEIGHT, MARGIN, LEGEND = 138, 62, 108, 42, 18, 38
# kind: (fill, border, border's width, the legend's words)
KINDS = {
    "trained": ("#b5e3c4", "#1b7a3d", 1.5, "trained matrix"),
    "frozen": ("url(#hatch)", "#33558b", 1.5, "frozen matrix"),
    "cached": ("#ffd58a", "#a85b00", 3, "cached, per token"),
    "plain": ("#ffffff", "#6b7280", 1, "computed, not kept"),
}
HEAD = """<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" \
role="img" font-family="'DejaVu Sans', Verdana, sans-serif" font-size="12" fill="#111827"><title>{title}</title>
<defs><pattern id="hatch" width="7" height="7" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">\
<rect width="7" height="7" fill="#dbe7fb"/><rect width="2" height="7" fill="#c0d3f3"/></pattern>
<marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">\
<path d="M 0 0 L 8 4 L 0 8 z" fill="#4b5563"/></marker></defs>
<rect x="0.5" y="0.5" width="{right}" height="{bottom}" rx="8" fill="#ffffff" stroke="#9ca3af"/>
"""
_BOX = (
    '<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="5" fill="{fill}" stroke="{border}" '
    'stroke-width="{line}"/>'
)
TEXT = '<text x="{x}" y="{y}" text-anchor="{anchor}">{text}</text>'
_ARROW = (
    '<path d="M {x1} {y1} H {bend} C {middle} {y1} {middle} {y2} {x2} {y2}" fill="none" stroke="#4b5563" '
    'marker-end="url(#tip)"/>'
)


@dataclass(frozen=True)
class Box:
    """A box at a place of the grid; rows may be halves. Its text has at most two lines, parted by a newline."""

    column: float
    row: float
    text: str
    kind: str = "plain"


@dataclass(frozen=True)
class Picture:
    """A title, boxes by name, and arrows as names parted by blanks: "a b c" is a to b to c."""

    title: str
    boxes: dict[str, Box]
    arrows: tuple[str, ...]


def svg(picture: Picture) -> str:
    """Return the picture as SVG."""
    boxes = picture.boxes
    columns, rows = (1 + max(getattr(box, axis) for box in boxes.values()) for axis in ("column", "row"))
    width = round(max(2 * MARGIN + columns * COLUMN - (COLUMN - BOX_WIDTH), 720))
    height = round(2 * MARGIN + rows * ROW + LEGEND)
    size = {"width": width, "height": height, "right": width - 1, "bottom": height - 1}
    lines = [HEAD.format(title=escape(picture.title), **size)]
    for names in picture.arrows:
        chain = [boxes[name] for name in names.split()]
        lines += [arrow(start, end) for start, end in pairwise(chain)]
    lines += [line for box in boxes.values() for line in box_lines(box)]
    lines += _legend(height - MARGIN - 20)
    return "\n".join(lines) + "\n</svg>\n"


def _corner(box: Box) -> tuple[float, float]:
    return MARGIN + box.column * COLUMN, MARGIN + box.row * ROW


def box_lines(box: Box) -> list[str]:
    x, y = _corner(box)
    texts = box.text.split("\n")
    first = y + BOX_HEIGHT / 2 + 4.5 - 7.5 * (len(texts) - 1)
    out = [rectangle(x, y, BOX_WIDTH, BOX_HEIGHT, box.kind)]
    for number, text in enumerate(texts):
        out.append(TEXT.format(x=x + BOX_WIDTH / 2, y=first + 15 * number, anchor="middle", text=escape(text)))
    return out


def rectangle(x: float, y: float, width: float, height: float, kind: str) -> str:
    fill, border, line, _ = KINDS[kind]
    return _BOX.format(x=x, y=y, width=width, height=height, fill=fill, border=border, line=line)


def arrow(start: Box, end: Box) -> str:
    (x1, y1), (x2, y2) = _corner(start), _corner(end)
    x1, y1, x2, y2 = x1 + BOX_WIDTH, y1 + BOX_HEIGHT / 2, x2 - 2, y2 + BOX_HEIGHT / 2
    # The bend lies in the gap before the target's column, so that no arrow crosses a box on its way.
    bend = x2 - (COLUMN - BOX_WIDTH) + 2
    return _ARROW.format(x1=x1, y1=y1, x2=x2, y2=y2, bend=bend, middle=(bend + x2) / 2)


def _legend(y: float) -> list[str]:
    out = []
    for number, (kind, (*_, words)) in enumerate(KINDS.items()):
        x = MARGIN + 172 * number
        out += [rectangle(x, y, 26, 18, kind), TEXT.format(x=x + 34, y=y + 13.5, anchor="start", text=words)]
    return out


def _heads(title: str, key: str, value: str, cached: tuple[str, str]) -> Picture:
    """Return the picture of attention that caches rotated keys, and values."""
    boxes = {
        "x": Box(0, 1, "hidden state\nx, width d"),
        "wq": Box(1, 0, "W_q\nH heads", "trained"),
        "wk": Box(1, 1, key, "trained"),
        "wv": Box(1, 2, value, "trained"),
        "rq": Box(2, 0, "rotate"),
        "rk": Box(2, 1, "rotate"),
        "k": Box(3, 1, cached[0], "cached"),
        "v": Box(3, 2, cached[1], "cached"),
        "a": Box(4, 1, "attention"),
        "o": Box(5, 1, "W_o", "trained"),
    }
    return Picture(title, boxes, ("x wq rq a o", "x wk rk k a", "x wv v a"))


def _from_keys(title: str, key: str, value: Box) -> Picture:
    """Return the picture of attention that caches keys alone, before their rotation."""
    boxes = {
        "x": Box(0, 1, "hidden state\nx, width d"),
        "wq": Box(1, 0, "W_q", "trained"),
        "wk": Box(1, 1, key, "trained"),
        "k": Box(2, 1, "key k\nd numbers", "cached"),
        "rq": Box(3, 0, "rotate"),
        "rk": Box(3, 1, "rotate when\nread"),
        "v": value,
        "a": Box(4, 1, "attention"),
        "o": Box(5, 1, "W_o", "trained"),
    }
    return Picture(title, boxes, ("x wq rq a o", "x wk k rk a", "k v a"))


def _latent(title: str, down: Box | None, held: str, key: Box, channel: bool = True) -> Picture:
    """Return the picture of one new token over cached latents: the key's matrix stands on the query's side."""
    boxes = {
        "x": Box(0, 1, "hidden state\nx, width d"),
        "wq": Box(1, 0, "W_q, and S_q\nfor the channel" if channel else "W_q", "trained"),
        "u": key,
        "c": Box(3, 1, held, "cached"),
        "a": Box(4, 1, "scores and\nmixture"),
        "w": Box(5, 1, "value matrix,\napplied once", "trained"),
        "o": Box(6, 1, "W_o", "trained"),
    }
    arrows = ["x wq u a w o"]
    if down is None:
        arrows.append("x c a")
    else:
        boxes |= {"d": down, "n": Box(2, 1, "RMSNorm")}
        arrows.append("x d n c a")
    if channel:
        boxes |= {
            "s": Box(1, 2, "S: one key part\nfor all heads", "trained"),
            "r": Box(2, 2, "rotate"),
            "p": Box(3, 2, "channel ρ\np numbers", "cached"),
        }
        arrows.append("x s r p a")
    return Picture(title, boxes, tuple(arrows))


def _offset() -> Picture:
    boxes = {
        "b": Box(0, 1, "token before\nx of j - 1"),
        "x": Box(0, 2, "hidden state\nx of token j"),
        "q": Box(1, 0, "W_q", "trained"),
        "kb": Box(1, 1, "W_k\n(the same)", "trained"),
        "k": Box(1, 2, "W_k", "trained"),
        "v": Box(1, 3, "W_v", "trained"),
        "t": Box(2, 1.5, "take a share\nfrom j - 1"),
        "rq": Box(3, 0, "rotate by\nposition j"),
        "r": Box(3, 1.5, "rotate by\nposition j"),
        "ck": Box(4, 1.5, "key\nd numbers", "cached"),
        "cv": Box(4, 3, "value\nd numbers", "cached"),
        "a": Box(5, 1.5, "attention"),
        "o": Box(6, 1.5, "W_o", "trained"),
    }
    return Picture("Key offset", boxes, ("x q rq a o", "b kb t r ck a", "x k t", "x v cv a"))


def _convolution() -> Picture:
    boxes = {
        "x": Box(0, 1, "hidden state\nx, width d"),
        "wq": Box(1, 0, "W_q", "trained"),
        "wk": Box(1, 1, "W_k", "trained"),
        "wv": Box(1, 2, "W_v", "trained"),
        "tq": Box(2, 0, "w taps over\nthe last w", "trained"),
        "tk": Box(2, 1, "w taps over\nthe last w", "trained"),
        "rq": Box(3, 0, "rotate"),
        "rk": Box(3, 1, "rotate"),
        "k": Box(4, 1, "key\nd numbers", "cached"),
        "v": Box(4, 2, "value\nd numbers", "cached"),
        "a": Box(5, 1, "attention"),
        "o": Box(6, 1, "W_o", "trained"),
    }
    return Picture("Convolution", boxes, ("x wq tq rq a o", "x wk tk rk k a", "x wv v a"))


_MOVED = Box(2, 0, "U_hᵀ: the key's\nmatrix, moved", "trained")
_STATE = "state x\nd numbers"
_LATENT_HELD = "latent c\nr numbers"
PICTURES = {
    "multi-head": _heads(
        "Multi-head attention", "W_k\nH heads", "W_v\nH heads", ("keys\nd numbers", "values\nd numbers")
    ),
    "grouped": _heads(
        "Grouped and multi-query attention",
        "W_k\ng of H heads",
        "W_v\ng of H heads",
        ("keys\ng·d_h numbers", "values\ng·d_h numbers"),
    ),
    "thin": _heads(
        "Thin keys",
        "W_k: m rows\nper head",
        "W_v: d_h rows\nper head",
        ("thin keys\nH·m numbers", "values\nd numbers"),
    ),
    "shared": _from_keys("K = V", "W_k", Box(3, 2, "value = key,\nnot rotated")),
    "orthogonal": _from_keys("Orthogonal key", "W_k, kept\northogonal", Box(3, 2, "W_v W_kᵀ:\nthe value", "trained")),
    "states": _latent("States", None, _STATE, _MOVED, channel=False),
    "identity": _latent("Identity key", None, _STATE, Box(2, 0, "slice h of x:\nno matrix"), channel=False),
    "channel": _latent("Rotary channel beside states", None, _STATE, _MOVED),
    "identity-channel": _latent(
        "Identity key with a latent and a channel",
        Box(1, 1, "D = identity:\nno matrix"),
        "latent c\nd numbers",
        Box(2, 0, "slice h of c:\nno matrix"),
    ),
    "latent-trained": _latent("Latent, trained", Box(1, 1, "D: r rows,\ntrained", "trained"), _LATENT_HELD, _MOVED),
    "latent-frozen": _latent("Latent, frozen", Box(1, 1, "D: r rows,\northonormal", "frozen"), _LATENT_HELD, _MOVED),
    "latent-random": _latent(
        "Latent, random control", Box(1, 1, "D: r rows,\nGaussian", "frozen"), _LATENT_HELD, _MOVED
    ),
    "offset": _offset(),
    "convolution": _convolution(),
    "halve-cache": _latent(
        "oelm.halve_cache", None, _STATE, Box(2, 0, "K_hᵀ of the\ncheckpoint", "trained"), channel=False
    ),
}


def main() -> None:
    """Write every picture into the folder of this file."""
    for name, picture in PICTURES.items():
        Path(__file__).with_name(f"{name}.svg").write_text(svg(picture), encoding="utf-8")


if __name__ == "__main__":
    main()
