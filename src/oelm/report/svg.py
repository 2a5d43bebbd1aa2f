"""Finish the SVG that matplotlib writes: add alt text and tooltips, and remove all that is not needed to show it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from xml.etree import ElementTree

from .charts import COLOURS

INK, MUTED, RULE, PANEL, PAPER = "#1a1a1a", "#5c5c5c", "#d9d9d9", "#f4f5f7", "#ffffff"
# The colours of a drawing as the variables of the page, which has two sets of them: one light, one dark.
_THEME = {INK: "var(--ink)", MUTED: "var(--muted)", RULE: "var(--line)", PANEL: "var(--panel)", PAPER: "var(--paper)"}
_THEME |= {colour: f"var(--c{number})" for number, colour in enumerate(COLOURS)}
_FONTS = "'DejaVu Sans', 'Noto Sans CJK SC', 'Noto Sans SC', 'PingFang SC', 'Microsoft YaHei', sans-serif"
_SVG, _XLINK = "http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"
_REFERENCE = re.compile(r"url\(#([^)]+)\)")
_FAMILY = re.compile(r"font-family: [^;]+;\s*")
_DIGITS = re.compile(r"\d+\.\d{3,}")


@dataclass(frozen=True)
class _Note:
    """What is added to one drawn element: attributes, a tooltip, and a tooltip for each of its marks."""

    attributes: dict[str, str]
    title: str
    points: Sequence[str]


@dataclass
class Notes:
    """Notes on the artists of a matplotlib figure; each artist gets an id that `finish` finds in the SVG."""

    by_id: dict[str, _Note] = field(default_factory=dict)

    def add(self, artist: Any, title: str = "", points: Sequence[str] = (), **attributes: str) -> None:
        """Give an artist a tooltip, its marks one each, and data attributes: `series="a"` becomes `data-series="a"`."""
        name = f"note-{len(self.by_id)}"
        artist.set_gid(name)
        self.by_id[name] = _Note({f"data-{key}": value for key, value in attributes.items()}, title, points)


def finish(svg: bytes, title: str, caption: str, notes: Notes) -> str:
    """Return the SVG as text, with alt text and notes, without the ids and metadata that nothing refers to."""
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", _XLINK)
    root = ElementTree.fromstring(svg)
    for element in root.findall(f"{{{_SVG}}}metadata"):
        root.remove(element)
    # matplotlib styles every element of the document, which would be the whole page, with a rule for `*`.
    for defs in root.findall(f"{{{_SVG}}}defs"):
        if defs.find(f"{{{_SVG}}}style") is not None:
            root.remove(defs)
    root.attrib |= {"stroke-linejoin": "round", "stroke-linecap": "butt", "font-family": _FONTS, "role": "img"}
    _annotate(root, notes)
    _drop_ids(root)
    _shorten(root)
    for position, (name, text) in enumerate((("title", title), ("desc", caption))):
        root.insert(position, _text_element(name, text))
    return ElementTree.tostring(root, encoding="unicode")


def themed(svg: str) -> str:
    """Return the SVG for a page that can be light or dark: its colours become the page's variables."""
    root = ElementTree.fromstring(svg)
    for element in root.iter():
        style = element.get("style")
        if style is not None:
            element.set("style", re.sub(r"#[0-9a-f]{6}", lambda match: _THEME.get(match[0], match[0]), style))
    return ElementTree.tostring(root, encoding="unicode")


def printable(text: str) -> str:
    """Return the text without control characters, which XML cannot hold, and with single spaces."""
    return "".join(char if char.isprintable() else "\N{REPLACEMENT CHARACTER}" for char in " ".join(text.split()))


def _annotate(root: ElementTree.Element, notes: Notes) -> None:
    for element in root.iter():
        note = notes.by_id.get(element.get("id", ""))
        if note is None:
            continue
        element.attrib |= note.attributes
        marks = list(element.iter(f"{{{_SVG}}}use"))
        if len(marks) == len(note.points):
            for mark, text in zip(marks, note.points, strict=True):
                mark.append(_text_element("title", text))
        if note.title:
            element.insert(0, _text_element("title", note.title))


def _text_element(name: str, text: str) -> ElementTree.Element:
    element = ElementTree.Element(f"{{{_SVG}}}{name}")
    element.text = printable(text)
    return element


def _drop_ids(root: ElementTree.Element) -> None:
    """Remove the ids that nothing refers to: a page has several figures, and an id may occur in it only once."""
    used = set()
    for element in root.iter():
        used.add(element.get(f"{{{_XLINK}}}href", "").removeprefix("#"))
        for value in element.attrib.values():
            used |= set(_REFERENCE.findall(value))
    for element in root.iter():
        if element.get("id") not in used:
            element.attrib.pop("id", None)


def _shorten(root: ElementTree.Element) -> None:
    """Shorten the text without changing the picture: half of it is indentation, digits and repeated styles."""
    for element in root.iter():
        for key in ("d", "x", "y", "transform"):
            # The matrix of a picture scales many pixels, so all of its digits count.
            if key in element.attrib and not element.attrib[key].startswith("matrix("):
                rounded = _DIGITS.sub(lambda match: f"{float(match[0]):.2f}", element.attrib[key])
                element.set(key, " ".join(rounded.split()))
        if element.get("transform", "").startswith("rotate(-0 "):
            del element.attrib["transform"]
        if "style" in element.attrib:
            element.set("style", _FAMILY.sub("", element.attrib["style"]))
        marks = list(element)
        styles = {mark.get("style") for mark in marks}
        if len(styles) == 1 and all(mark.tag == f"{{{_SVG}}}use" for mark in marks):
            element.set("style", marks[0].attrib["style"])
            for mark in marks:
                del mark.attrib["style"]
        if not (element.text or "").strip():
            element.text = None
        element.tail = "\n"
