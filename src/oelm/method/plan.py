"""Which matrices of a model a method touches, and what trains beside them: chosen and checked before any change."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from ..errors import MethodError
from .families import Family
from .matrices import hadamard_seed
from .sites import Site
from .spec import FACTORED, KEEPING, FeedForward, Method, Projection

# A share counts as reached to half a percentage point: biases and norms stay trained, so round shares (Q/K and all of
# FFN-in are 49.9 % of a GPT's blocks) are missed by that much, and another whole tensor would overshoot by 5 points.
SHARE_TOLERANCE = 0.005


@dataclass(frozen=True)
class Target:
    """One matrix to set or freeze: where it is, how it is made, and how many orthonormal blocks it has.

    `factor` is what its orthonormal (or Gaussian) rows are multiplied by. `reach` is how many heads share a core on it.
    """

    site: Site
    role: str
    path: str
    spec: Projection | FeedForward
    blocks: int
    factor: float
    reach: int = 1


def plan(model: nn.Module, family: Family, sites: list[Site], method: Method) -> list[Target]:
    """Every matrix that the method touches. Raises when the method does not fit the model or would touch nothing."""
    chosen = choose_sites(family, sites, method)
    targets = []
    for site, reach in zip(chosen, _reaches(chosen, method), strict=True):
        targets += _targets(model, family, site, method, reach)
    if not method.ffn.untouched and not any(target.role.startswith("ffn") for target in targets):
        raise MethodError("the method sets the feed-forward matrices, but the chosen attentions' blocks name none")
    for target in targets:
        check(family, target, method)
    if method.freeze_ratio is not None:
        targets = _up_to_share(model, sites, targets, method.freeze_ratio)
    return targets


def core_sides(model: nn.Module, family: Family, method: Method) -> tuple[str, ...]:
    """Where the method's core goes: on Q alone where Q and K meet only each other, else a matrix on each side.

    An identity for K stays one whatever it meets: that it is nothing but the state is what it is for.
    """
    if method.core == "none":
        return ()
    one_sided = method.core == "gain" or method.k.init == "identity" or family.meets(model.config) is None
    return ("q",) if one_sided else ("q", "k")


def block_parameters(model: nn.Module, sites: Iterable[Site]) -> dict[int, nn.Parameter]:
    """The parameters of the blocks (embeddings and head aside), each once, by identity."""
    blocks = {site.block for site in sites}
    return {id(p): p for block in blocks for p in model.get_submodule(block).parameters()}


def choose_sites(family: Family, sites: list[Site], method: Method) -> list[Site]:
    """The attentions that the method's `layers` and `attention` choose."""
    if family.shared and method.layers != "all":
        raise MethodError(
            f"layers {method.layers!r}: this model has one attention module for all its layers, so none can be chosen"
        )
    kinds = list(dict.fromkeys(site.kind for site in sites))
    if method.attention != "all":
        absent = [kind for kind in method.attention if kind not in kinds]
        if absent:
            raise MethodError(f"attention {', '.join(absent)}: this model has only {', '.join(kinds)} attention")
        kinds = [kind for kind in kinds if kind in method.attention]
    chosen = []
    for kind in kinds:
        stack = [site for site in sites if site.kind == kind]
        layers = method.choose_layers(len(stack))
        chosen += [site for site in stack if site.layer in layers]
    return chosen


def _reaches(chosen: list[Site], method: Method) -> list[int]:
    """How many heads share a core, for each chosen site; 0 is all of them."""
    if isinstance(method.reach, int):
        return [method.reach] * len(chosen)
    found = []
    for kind in dict.fromkeys(site.kind for site in chosen):
        stack = [site for site in chosen if site.kind == kind]
        if isinstance(method.reach, str):
            wide = int(method.reach.removeprefix("first:"))
            if wide > len(stack) and not stack[0].shared:  # the one block of a model that shares it is all its layers
                raise MethodError(f"reach {method.reach!r} does not fit the {len(stack)} {kind} layers of the method")
            found += [0 if index < wide else 1 for index in range(len(stack))]
        elif len(method.reach) == len(stack):
            found += method.reach
        else:
            raise MethodError(
                f"reach names {len(method.reach)} layers, and the method covers {len(stack)} {kind} layers: name each"
            )
    return found


def _targets(model: nn.Module, family: Family, site: Site, method: Method, reach: int) -> list[Target]:
    targets = []
    sides = core_sides(model, family, method)
    for role, spec in (("q", method.q), ("k", method.k)):
        if not spec.untouched:
            blocks = 1 if spec.scope == "global" else site.heads_of(role)
            factor = spec.scale * _family_factor(model, family, site, role, spec, method)
            together = (reach or site.heads_of(role)) if role in sides else 1
            targets.append(Target(site, role, site.roles[role], spec, blocks, factor, together))
    if not method.ffn.untouched:
        targets += [Target(site, role, path, method.ffn, 1, 1.0) for role, path in site.feed_forward()]
    return targets


def _family_factor(model: nn.Module, family: Family, site: Site, role: str, spec: Projection, method: Method) -> float:
    """1/sqrt(d_head) for a Q that the attention does not scale itself and whose old length is not kept."""
    keeps_length = spec.init in KEEPING or (method.core == "matrix" and spec.init in FACTORED)
    if role != "q" or keeps_length or family.scales(model.config):
        return 1.0
    return float(site.d_head**-0.5)


def check(family: Family, target: Target, method: Method) -> None:
    """Raises where a matrix makes no sense for the site: the message names the numbers that do not fit."""
    if not isinstance(target.spec, Projection):
        return
    site, spec, where = target.site, target.spec, f"{target.path} ({target.role})"
    heads = site.heads_of(target.role)
    rows = heads * site.d_head
    if family.qk_norm and spec.scale != 1.0:
        raise MethodError(
            f"{where}: scale {spec.scale} has no effect, the norm after the projection cancels it; use scale 1"
        )
    if family.qk_norm and method.core == "gain":
        raise MethodError(f"{where}: a gain has no effect, the norm after the projection cancels it; use core 'matrix'")
    if spec.init == "identity" and site.heads * site.d_head != site.width:
        raise MethodError(
            f"{where}: identity needs a hidden size of heads x d_head, but {site.heads} x {site.d_head} "
            f"is not {site.width}; use init 'orthogonal'"
        )
    if spec.init in ("orthogonal", "hadamard", "qr", "polar"):
        if spec.scope == "global" and rows > site.width:
            raise MethodError(
                f"{where}: {rows} rows of width {site.width} cannot be orthonormal over all heads; use scope 'head'"
            )
        if site.d_head > site.width:
            raise MethodError(f"{where}: heads of {site.d_head} rows of width {site.width} cannot be orthonormal")
    if spec.init == "hadamard":
        try:
            hadamard_seed(site.width)
        except MethodError as error:
            raise MethodError(f"{where}: {error}") from None
    if method.core == "matrix" and spec.scope == "global" and spec.init in FACTORED:
        raise MethodError(f"{where}: a core per head needs a basis per head; use scope 'head'")
    if heads % target.reach:
        raise MethodError(f"{where}: reach {target.reach} does not divide its {heads} heads into groups")


def _up_to_share(model: nn.Module, sites: list[Site], targets: list[Target], ratio: float | str) -> list[Target]:
    """The first targets, in freezing order, whose weights make up the share of the blocks' parameters."""
    blocks = sum(p.numel() for p in block_parameters(model, sites).values())
    order = {"q": 0, "k": 0, "ffn_in": 1, "ffn_out": 2}
    ordered = sorted(targets, key=lambda t: (order[t.role], -t.site.layer))
    if ratio == "qk":
        return [target for target in ordered if order[target.role] == 0]
    frozen, taken = 0, []
    for target in ordered:
        if frozen / blocks >= float(ratio) - SHARE_TOLERANCE:
            break
        frozen += _count(target, model)
        taken.append(target)
    if frozen / blocks < float(ratio) - SHARE_TOLERANCE:
        raise MethodError(
            f"freeze_ratio {ratio}: all of Q, K and the feed-forward matrices are only {frozen / blocks:.1%} "
            "of the blocks' parameters; ask for less"
        )
    return taken


def _count(target: Target, model: nn.Module) -> int:
    """The weights of a target, without its bias: a share is one of matrices."""
    if target.role in ("q", "k"):
        return target.site.heads_of(target.role) * target.site.d_head * target.site.width
    weight = model.get_submodule(target.path).weight
    return int(weight.numel())  # type: ignore[operator]
