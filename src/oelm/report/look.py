"""The page and the picture of a look inside: every head's maps and figures, of one model, of two, or over a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from .. import __version__
from ..base.files import write_bytes, write_text, writing
from ..base.text import visible
from ..errors import FileError
from ..runs.looks import MEASURES, Drift, HeadLook, HeadName, Kind, LayerMap, Look, ModelLook, TextLook
from .charts import ChartFigure, Grid, Lines, Series
from .document import Block, Bullets, Cell, Document, Heading, Paragraph, Table
from .drawing import cjk_font, draw
from .html import to_html
from .maps import MapsFigure, draw_maps
from .words import Words, words

# The figures of a head, in the order of tables.
_FIGURES = (*MEASURES, "induction", "effective_rank")
# A text of more tokens has no maps with its tokens at the sides: nobody could read them.
_MOST_TOKENS = 32

Maps = Sequence[Sequence[Sequence[LayerMap]]]


def write_look(look: Look, maps: Maps, out: Path, language: str = "en") -> tuple[list[Path], list[str]]:
    """Write look.json, look.html and look.png into a folder; return the files, and why one is missing, if it is.

    `maps` are those of each model on each text; the first text's are drawn.
    """
    say = words(language)
    if out.exists() and not out.is_dir():
        raise FileError(f"{out}: is a file; name a folder with --out")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    picture = _maps_figure(look, maps, say)
    document = _compose(look, maps, picture, say)
    legible = language != "zh" or cjk_font() is not None
    drawn = draw_maps(picture, png=legible)
    drawings = {name: drawing.svg for name, drawing in draw(_charts(document)).items()} | {picture.name: drawn.svg}
    files, problems = [out / "look.json", out / "look.html"], []
    look.write(files[0])
    write_text(files[1], to_html(document, drawings))
    if drawn.png is not None:
        files.append(out / "look.png")
        write_bytes(files[-1], drawn.png)
    else:
        (out / "look.png").unlink(missing_ok=True)
        problems.append(say("no_png"))
    return files, problems


def strongest_heads(model: ModelLook) -> list[tuple[str, HeadLook, float]]:
    """Return each figure of attention with the head that has the highest value, of the entropy the lowest."""
    found = []
    for name in (*MEASURES, "induction"):
        known = [(getattr(head, name), head) for head in model.heads if getattr(head, name) is not None]
        if known:
            choose = min if name == "entropy" else max
            value, head = choose(known, key=lambda pair: pair[0])
            found.append((name, head, value))
    return found


def head_label(head: HeadName, several_kinds: bool, say: Words) -> str:
    """Return a head's name in a table: its layer and number."""
    return say("look_name_of_head", layer=_layer_label(head, several_kinds, say), head=head.head)


def has_several_kinds(model: ModelLook) -> bool:
    """Return True for a model with more than one kind of attention, so that a layer's name needs it."""
    return len({head.kind for head in model.heads}) > 1


def _layer_label(layer: HeadName | LayerMap, several_kinds: bool, say: Words) -> str:
    key = f"look_kind_{layer.kind}" if several_kinds else "look_layer"
    return say(key, layer=layer.layer)


def _charts(document: Document) -> list[ChartFigure]:
    return [figure for figure in document.figures if figure.charts]


def _name(model: ModelLook) -> str:
    return visible(f"{model.source} ({model.model})" if model.model else model.source)


def _compose(look: Look, maps: Maps, picture: MapsFigure, say: Words) -> Document:
    sources = [visible(model.source) for model in look.models]
    title = say("look_title", model=sources[0])
    if len(sources) == 2:
        title = say("look_title_of_two", first=sources[0], second=sources[1])
    blocks: list[Block] = [Heading(say("look_found"), 2, "found"), *_strongest(look.models, say)]
    blocks += [Heading(say("look_maps"), 2, "maps"), picture, *_token_maps(look.models, maps, say)]
    blocks += list(_differences(look, say))
    blocks += list(_drift(look.drift, look.models[0], say)) if look.drift is not None else []
    blocks.append(Heading(say("look_heads"), 2, "heads"))
    for number, model in enumerate(look.models):
        blocks += [_grids(model, number, say), _heads_table(model, number, say)]
    blocks += list(_spread(look.models, say))
    blocks += _explained(look, say)
    blocks += _texts(look.models[0].texts, say)
    footer = say("look_made_by", version=__version__, models=say("and_then").join(map(_name, look.models)))
    return Document(title, say.language, blocks, footer)


def _strongest(models: Sequence[ModelLook], say: Words) -> Iterator[Block]:
    for number, model in enumerate(models):
        columns = say.all("look_figure", "look_head", "look_value")
        table = Table(f"strongest-{number}", columns, numeric=(2,), caption=say("look_strongest"))
        for name, head, value in strongest_heads(model):
            label = head_label(head, has_several_kinds(model), say)
            table.add(Cell(say(f"look_measure_{name}"), strong=True), label, _share(value))
        yield Paragraph(f"{_name(model)}: {model.model_class}", "lead")
        yield table
        if model.without_cross:
            yield Paragraph(say("look_without_cross"), "muted")


def _maps_figure(look: Look, maps: Maps, say: Words) -> MapsFigure:
    return MapsFigure(
        name="look-maps",
        title=say("look_maps"),
        caption=say("look_maps_caption", text=1, tokens=len(look.models[0].texts[0].tokens)),
        charts=[],
        names=tuple(_name(model) for model in look.models),
        labels=tuple(
            tuple(_layer_label(own, has_several_kinds(model), say) for own in of_model[0])
            for model, of_model in zip(look.models, maps, strict=True)
        ),
        head=say("look_head"),
        maps=tuple(tuple(of_model[0]) for of_model in maps),
    )


def _token_maps(models: Sequence[ModelLook], maps: Maps, say: Words) -> Iterator[Block]:
    """Yield a figure for each model with the maps of its strongest heads, with tokens at the sides of short texts."""
    for number, (model, of_model) in enumerate(zip(models, maps, strict=True)):
        text = model.texts[0]
        if max(len(text.tokens), len(text.target_tokens or [])) > _MOST_TOKENS:
            continue
        figures: dict[tuple[Kind, int, int], list[str]] = {}
        for name, head, _ in strongest_heads(model):
            figures.setdefault((head.kind, head.layer, head.head), []).append(say(f"look_measure_{name}"))
        by_place = {(head.kind, head.layer, head.head): head for head in model.heads}
        weights = {(own.kind, own.layer): own.weights for own in of_model[0]}
        charts = []
        for place, names in figures.items():
            label = head_label(by_place[place], has_several_kinds(model), say)
            title = say("headed", head=label, text=say("list").join(names))
            charts.append(_token_map(by_place[place], text, weights[place[0], place[1]][place[2]].tolist(), title))
        caption = say("look_token_maps_caption", text=1)
        yield ChartFigure(f"look-tokens-{number}", say("look_token_maps"), caption, list(charts))


def _token_map(head: HeadName, text: TextLook, weights: list[list[float]], title: str) -> Grid:
    targets = text.target_tokens or text.tokens
    queries = text.tokens if head.kind == "encoder" else targets
    keys = targets if head.kind == "decoder" else text.tokens
    return Grid(
        rows=[_shown(token) for token in queries],
        columns=[_shown(token) for token in keys],
        values=[list(row) for row in weights],
        texts=[[f"{100 * weight:.0f}" if weight >= 0.1 else "" for weight in row] for row in weights],
        title=title,
    )


def _shown(token: str) -> str:
    """Return a token as a label: one of spaces alone would not be seen."""
    return token if token.strip() else "␣"


def _grids(model: ModelLook, number: int, say: Words) -> ChartFigure:
    """Return a figure with a grid of layers and heads for each figure."""
    several = has_several_kinds(model)
    layers = list(dict.fromkeys((head.kind, head.layer) for head in model.heads))
    heads = 1 + max(head.head for head in model.heads)
    by_name = {(head.kind, head.layer, head.head): head for head in model.heads}
    rows = [_layer_label(by_name[*layer, 0], several, say) for layer in layers]
    charts = []
    for name in _FIGURES:
        cells = [[by_name.get((*layer, head)) for head in range(heads)] for layer in layers]
        values = [[None if head is None else _as_share(head, name) for head in row] for row in cells]
        if any(value is not None for row in values for value in row):
            texts = [["" if head is None else _figure(head, name) for head in row] for row in cells]
            columns = [str(head) for head in range(heads)]
            title = say(f"look_measure_{name}")
            charts.append(Grid(rows=rows, columns=columns, values=values, texts=texts, title=title))
    texts_read = len(model.texts)
    key = "look_grids_caption" if texts_read > 1 else "look_grids_caption_one"
    caption = say(key, model=_name(model), texts=texts_read)
    return ChartFigure(f"look-grids-{number}", say("look_heads"), caption, list(charts))


def _heads_table(model: ModelLook, number: int, say: Words) -> Table:
    titles = [say(f"look_measure_{name}") for name in _FIGURES]
    numeric = tuple(range(1, len(_FIGURES) + 2))
    table = Table(
        f"heads-{number}", [say("look_head"), *titles, say("look_rank")], numeric=numeric, caption=_name(model)
    )
    for head in model.heads:
        cells = [_figure(head, name) for name in _FIGURES]
        rank = "" if head.rank is None else say("look_rank_of", rank=head.rank, full=head.full_rank)
        table.add(head_label(head, has_several_kinds(model), say), *cells, rank)
    return table


def _differences(look: Look, say: Words) -> Iterator[Block]:
    if len(look.models) < 2:
        return
    several = has_several_kinds(look.models[0])
    yield Heading(say("look_differences"), 2, "differences")
    if not look.differences:
        yield Paragraph(say("look_no_heads"))
        return
    first, second = look.models
    titles = [say(f"look_measure_{name}") for name in _FIGURES]
    caption = say("look_differences_caption", first=_name(first), second=_name(second))
    numeric = tuple(range(1, len(_FIGURES) + 2))
    table = Table("differences", [say("look_head"), *titles, say("look_distance")], numeric=numeric, caption=caption)
    for head in look.differences:
        cells = [_signed(head.differences.get(name)) for name in _FIGURES]
        table.add(head_label(head, several, say), *cells, _share(head.distance))
    if all(head.distance is None for head in look.differences):
        yield Paragraph(say("look_other_tokens"))
    yield table


def _drift(drift: Drift, model: ModelLook, say: Words) -> Iterator[Block]:
    several = has_several_kinds(model)
    yield Heading(say("look_drift"), 2, "drift")
    by_layer: dict[str, list[list[float]]] = {}
    for head in drift.heads:
        by_layer.setdefault(_layer_label(head, several, say), []).append(head.distances)
    axis = say("look_step")
    series = [
        Series(name=layer, style=style, x={axis: [float(step) for step in drift.steps]}, y=_means(distances))
        for style, (layer, distances) in enumerate(by_layer.items())
    ]
    chart = Lines(axes={axis: axis}, y_label=say("look_distance"), series=series)
    caption = say("look_drift_caption", step=drift.steps[-1])
    yield ChartFigure("look-drift", say("look_drift"), caption, [chart])
    numeric = tuple(range(1, len(drift.steps) + 1))
    table = Table("drift", [say("look_head"), *(f"{axis} {step:,}" for step in drift.steps)], numeric=numeric)
    for head in drift.heads:
        table.add(head_label(head, several, say), *(_share(value) for value in head.distances))
    yield table


def _means(rows: Sequence[Sequence[float]]) -> list[float]:
    return [sum(column) / len(column) for column in zip(*rows, strict=True)]


def _spread(models: Sequence[ModelLook], say: Words) -> Iterator[Block]:
    if len(models[0].texts) < 2:
        return
    yield Heading(say("look_spread"), 2, "spread")
    for number, model in enumerate(models):
        columns = [say("look_head"), *(say(f"look_measure_{name}") for name in MEASURES)]
        caption = f"{_name(model)}: {say('look_spread_caption', texts=len(model.texts))}"
        table = Table(f"spread-{number}", columns, numeric=tuple(range(1, len(MEASURES) + 1)), caption=caption)
        for head in model.heads:
            cells = [_share(head.spread.get(name)) for name in MEASURES]
            table.add(head_label(head, has_several_kinds(model), say), *cells)
        yield table


def _explained(look: Look, say: Words) -> list[Block]:
    lines = say.all("look_how_previous", "look_how_prefix", "look_how_induction", "look_how_entropy", "look_how_rank")
    if len(look.models) > 1 or look.drift is not None:
        lines.append(say("look_how_distance"))
    return [Heading(say("look_how"), 2, "how"), Bullets([Cell(line) for line in lines])]


def _texts(texts: Sequence[TextLook], say: Words) -> list[Block]:
    table = Table("texts", say.all("look_number", "look_tokens", "look_text"), numeric=(0, 1))
    for number, text in enumerate(texts, start=1):
        shown = text.text if text.text is not None else say("look_own_tokens", tokens=" ".join(text.tokens))
        table.add(str(number), str(len(text.tokens)), visible(shown))
    return [Heading(say("look_texts"), 2, "texts"), table]


def _as_share(head: HeadLook, name: str) -> float | None:
    """Return a figure as a share from 0 to 1, for its shade: the effective rank of the largest that is possible."""
    if name == "effective_rank":
        return None if head.effective_rank is None or not head.full_rank else head.effective_rank / head.full_rank
    value: float | None = getattr(head, name)
    return value


def _figure(head: HeadLook, name: str) -> str:
    value: float | None = getattr(head, name)
    if value is None:
        return ""
    return f"{value:.1f}" if name == "effective_rank" else _share(value)


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _signed(value: float | None) -> str:
    return "" if value is None else f"{value:+.2f}".replace("-", "−")
