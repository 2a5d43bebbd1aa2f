"""Look inside models: what every head attends to on given texts, how two models differ, and how a run's heads drift."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError
from ..method.sites import Site, find_sites
from ..runs.environment import git_commit
from ..runs.looks import (
    MEASURES,
    Drift,
    HeadDifference,
    HeadDrift,
    HeadLook,
    Kind,
    LayerMap,
    Look,
    ModelLook,
    TextLook,
)
from .attention_maps import attention_maps, batch_weights
from .head_figures import distance, induction, text_figures, visible_keys
from .head_forms import FormRank, form_ranks
from .look_sources import (
    LookedAt,
    Texts,
    TokensRead,
    checkpoint_models,
    longest_text,
    open_source,
    read_texts,
    require_checkpoints,
)

# Random tokens in a block that is repeated, and the number of such blocks that the induction score is a mean over.
_BLOCK, _BLOCKS = 32, 16
# The figures that two models are compared by.
COMPARED = (*MEASURES, "induction", "effective_rank")

Place = tuple[Kind, int]
Show = Callable[[str, int, int], None]


@dataclass(frozen=True, eq=False)
class LookResult:
    """The figures, and for each model the maps of each text."""

    look: Look
    maps: list[list[list[LayerMap]]]


def look_at(
    sources: Sequence[Path],
    given: Texts,
    *,
    layers: Sequence[int] = (),
    last: bool = False,
    drift: bool = False,
    show: Show = lambda description, done, total: None,
) -> LookResult:
    """Return the figures and maps of one model or two, of all layers or of those given.

    With `drift`, the model is that of a run's last checkpoint, and the maps of all its checkpoints are compared with
    its own. `show` is told how many models are done.
    """
    if len(sources) > 2:
        raise ConfigError(f"look: {len(sources)} folders; give one, or two to compare")
    if drift and len(sources) > 1:
        raise ConfigError("look: --drift follows one run; leave out the second folder")
    if drift:
        require_checkpoints(sources[0])
    models, maps, read = [], [], []
    for number, source in enumerate(sources):
        show("models", number, len(sources))
        looked_at = open_source(source, last or drift)
        readings = read_texts(looked_at, given)
        found = _all_maps(looked_at.model, readings, layers)
        models.append(_measure(looked_at, readings, found))
        maps.append(found)
        read.append([(reading.ids, reading.target_ids) for reading in readings])
    fields: dict[str, Any] = {"git_commit": git_commit(), "models": models}
    if len(sources) == 2:
        fields["differences"] = _differences(models, maps if read[0] == read[1] else None)
    if drift:
        fields["drift"] = _drift(sources[0], readings, layers, maps[0], show)
    return LookResult(Look(**fields), maps)


def _all_maps(model: Any, readings: Sequence[TokensRead], layers: Sequence[int]) -> list[list[LayerMap]]:
    """Return the maps of each text, of the chosen layers."""
    own_kind = find_sites(model)[1][0].kind
    found = []
    for reading in readings:
        maps = attention_maps(model, own_kind, *_tensors(model, reading))
        count = 1 + max(own.layer for own in maps)
        if any(not 0 <= layer < count for layer in layers):
            raise ConfigError(f"--layer {max(layers)}: the model has layers 0 to {count - 1}")
        found.append([own for own in maps if not layers or own.layer in layers])
    return found


def _tensors(model: Any, reading: TokensRead) -> tuple[torch.Tensor, torch.Tensor | None]:
    ids, target_ids = reading.ids, reading.target_ids
    row = torch.tensor([ids], device=model.device)
    return row, None if target_ids is None else torch.tensor([target_ids], device=model.device)


def _measure(looked_at: LookedAt, readings: Sequence[TokensRead], maps: Sequence[Sequence[LayerMap]]) -> ModelLook:
    model = looked_at.model
    _, sites = find_sites(model)
    texts = [_text_look(model, reading, own) for reading, own in zip(readings, maps, strict=True)]
    scores, ranks = _induction_scores(model, sites[0].kind), _ranks(model, sites, maps[0])
    heads = []
    for index, first in enumerate(texts[0].heads):
        by_text = [text.heads[index] for text in texts]
        place = (first.kind, first.layer)
        rank = ranks[place][first.head]
        values = {name: [getattr(head, name) for head in by_text] for name in MEASURES}
        fields: dict[str, Any] = {name: _mean(of_texts) for name, of_texts in values.items()}
        if len(texts) > 1:
            fields["spread"] = {name: _spread(of_texts) for name, of_texts in values.items()}
        fields |= first.model_dump(include={"kind", "layer", "head"})
        fields |= {"induction": scores[place][first.head] if place in scores else None}
        fields |= {"effective_rank": rank.effective, "rank": rank.numerical, "full_rank": rank.full}
        heads.append(HeadLook.model_validate(fields))
    has_cross = any(site.kind == "cross" for site in sites)
    return ModelLook(
        source=looked_at.source,
        model=looked_at.label,
        model_class=type(model).__name__,
        family=model.config.model_type,
        heads=heads,
        texts=texts,
        without_cross=has_cross and not model.config.is_encoder_decoder,
    )


def _text_look(model: Any, reading: TokensRead, maps: Sequence[LayerMap]) -> TextLook:
    heads = []
    for own in maps:
        _, queries, keys = own.weights.shape
        visible = visible_keys(model.config, own.kind, own.layer, queries, keys)
        ids = reading.ids if own.kind == "encoder" or reading.target_ids is None else reading.target_ids
        for head, figures in enumerate(text_figures(own, ids, visible)):
            place: dict[str, Any] = {"kind": own.kind, "layer": own.layer, "head": head}
            heads.append(HeadLook.model_validate(place | figures))
    return TextLook(
        text=reading.text,
        tokens=list(reading.tokens),
        target_tokens=None if reading.target_tokens is None else list(reading.target_tokens),
        heads=heads,
    )


def _induction_scores(model: Any, own_kind: Kind) -> dict[Place, list[float]]:
    """Return the induction scores of all layers that look within one text; none for a model too small for blocks."""
    limit, rows = longest_text(model), model.get_input_embeddings().weight.shape[0]
    special = {getattr(model.config, name, None) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    usable = torch.tensor([token for token in range(rows) if token not in special])
    length = min(_BLOCK, len(usable), _BLOCK if limit is None else limit // 2)
    if length < 2:
        return {}
    generator = torch.Generator().manual_seed(0)
    blocks = [usable[torch.randperm(len(usable), generator=generator)[:length]] for _ in range(_BLOCKS)]
    ids = torch.stack(blocks).repeat(1, 2).to(model.device)
    weights = batch_weights(model, own_kind, ids, ids if model.config.is_encoder_decoder else None)
    return {place: induction(own.numpy()) for place, own in weights.items() if place[0] != "cross"}


def _ranks(model: Any, sites: Sequence[Site], maps: Sequence[LayerMap]) -> dict[Place, list[FormRank]]:
    """Return the ranks of every layer's heads. A block that serves several layers is decomposed once."""
    by_site: dict[str, list[FormRank]] = {}
    ranks = {}
    for own in maps:
        of_kind = [site for site in sites if site.kind == own.kind]
        # The layers of ALBERT's groups follow each other.
        layers = model.config.num_hidden_layers if of_kind[0].shared else len(of_kind)
        site = of_kind[own.layer * len(of_kind) // layers]
        if site.roles["q"] not in by_site:
            by_site[site.roles["q"]] = form_ranks(model, site)
        ranks[own.kind, own.layer] = by_site[site.roles["q"]]
    return ranks


def _differences(models: Sequence[ModelLook], maps: Sequence[list[list[LayerMap]]] | None) -> list[HeadDifference]:
    """Return the second model's figures less the first's for all heads that both have."""
    distances = {} if maps is None else _distances(maps[0], maps[1])
    second = {(head.kind, head.layer, head.head): head for head in models[1].heads}
    out = []
    for head in models[0].heads:
        name = (head.kind, head.layer, head.head)
        if name in second:
            pairs = {field: (getattr(head, field), getattr(second[name], field)) for field in COMPARED}
            changes = {field: None if None in pair else pair[1] - pair[0] for field, pair in pairs.items()}
            out.append(
                HeadDifference(
                    kind=name[0], layer=name[1], head=name[2], differences=changes, distance=distances.get(name)
                )
            )
    return out


def _distances(
    left: Sequence[Sequence[LayerMap]], right: Sequence[Sequence[LayerMap]]
) -> dict[tuple[Kind, int, int], float]:
    """Return the mean distance over the texts between the maps of each head that both have."""
    sums: dict[tuple[Kind, int, int], list[float]] = {}
    for own_maps, other_maps in zip(left, right, strict=True):
        others = {(other.kind, other.layer): other.weights for other in other_maps}
        for own in own_maps:
            other = others.get((own.kind, own.layer))
            if other is None:
                continue
            heads = min(len(own.weights), len(other))
            for head, value in enumerate(distance(own.weights[:heads], other[:heads])):
                sums.setdefault((own.kind, own.layer, head), []).append(value)
    return {name: sum(values) / len(values) for name, values in sums.items()}


def _drift(
    run: Path, readings: Sequence[TokensRead], layers: Sequence[int], last: list[list[LayerMap]], show: Show
) -> Drift:
    steps: list[int] = []
    by_head: dict[tuple[Kind, int, int], list[float]] = {}
    for number, (step, model) in enumerate(checkpoint_models(run)):
        show("checkpoints", number, number + 1)
        steps.append(step)
        for name, value in _distances(_all_maps(model, readings, layers), last).items():
            by_head.setdefault(name, []).append(value)
    heads = [
        HeadDrift(kind=kind, layer=layer, head=head, distances=values)
        for (kind, layer, head), values in by_head.items()
    ]
    return Drift(steps=steps, heads=heads)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _spread(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return max(known) - min(known) if len(known) > 1 else None
