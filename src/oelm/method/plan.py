"""Fits a method to a model: which matrices it touches and where its core and adapters go, checked before any change."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from torch import nn

from ..errors import MethodError, ModelError
from .adapters import AdapterTarget, adapter_targets
from .families import Family
from .matrices import hadamard_seed
from .sites import Site, find_sites, weight_matrix
from .spec import FACTORED, KEEPING, ORTHONORMAL, FeedForward, Latent, Method, Projection

# A share counts as reached to half a percentage point: biases and norms stay trained, so round shares (Q/K and all of
# FFN-in are 49.9 % of a GPT's blocks) are missed by that much, and another whole tensor would overshoot by 5 points.
SHARE_TOLERANCE = 0.005

# The order in which `freeze_ratio` takes matrices: Q and K, then FFN-in, then FFN-out.
_FREEZING_ORDER = {"q": 0, "k": 0, "ffn_in": 1, "ffn_out": 2}


@dataclass(frozen=True, kw_only=True)
class Target:
    """One matrix to set or freeze: where it is, how it is made, and how many orthonormal blocks it has.

    `factor` multiplies its orthonormal (or Gaussian) rows. `reach` is the number of heads that share a core on it.
    """

    site: Site
    role: str
    path: str
    spec: Projection | FeedForward | Latent
    blocks: int = 1
    factor: float = 1.0
    reach: int = 1


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What a method does to one model, found and checked once, for everything that carries it out.

    sites         every attention of the model, chosen by the method or not
    targets       the matrices to set or freeze
    adapted       the matrices that get an adapter
    core_sides    the projections that get a core: none, ("q",) or ("q", "k")

    Paths are the same before and after the operation, so it describes the model in both states.
    """

    method: Method
    family: Family
    sites: tuple[Site, ...]
    targets: tuple[Target, ...]
    adapted: tuple[AdapterTarget, ...]
    core_sides: tuple[str, ...]

    @property
    def frozen_at_start(self) -> list[str]:
        """Return the paths of the matrices that are frozen at once; the schedule 'freeze' does it during training."""
        later = self.method.schedule.kind == "freeze"
        return [] if later else [target.path for target in self.targets if target.spec.frozen]


def plan(model: nn.Module, method: Method, family: Family | None = None) -> Operation:
    """Return what the method does to the model. Raise when it does not fit the model or would touch nothing.

    The family is that of the model's type, unless one is given to be tried.
    """
    family, sites = find_sites(model, family)
    chosen = _choose_sites(family, sites, method)
    sides = _core_sides(model, family, method)
    divisor = family.divisor(model.config)
    targets: list[Target] = []
    for site, reach in zip(chosen, _reaches(chosen, method), strict=True):
        for role in ("q", "k"):
            targets += _projection_target(site, role, method, divisor, reach if role in sides else 1)
        targets += _latent_targets(site, method)
        if not method.ffn.untouched:
            targets += [Target(site=site, role=role, path=path, spec=method.ffn) for role, path in site.feed_forward]
    if not method.ffn.untouched and not any(target.role.startswith("ffn") for target in targets):
        raise MethodError("the method sets the feed-forward matrices, but the chosen attentions' blocks name none")
    normed = family.normed(model.config)
    for target in targets:
        check(target, method, normed, family.per_head)
    _require_own_weights(model, targets)
    if method.freeze_ratio is not None:
        targets = _up_to_share(model, sites, targets, method.freeze_ratio)
    adapted = tuple(adapter_targets(chosen, method.adapter))
    return Operation(
        method=method, family=family, sites=tuple(sites), targets=tuple(targets), adapted=adapted, core_sides=sides
    )


def _require_own_weights(model: nn.Module, targets: list[Target]) -> None:
    """Raise where another module holds a target's weight too: it would be set twice, or frozen without a word."""
    holders: dict[int, list[str]] = {}
    for path, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            holders.setdefault(id(parameter), []).append(path)
    paths = {target.path for target in targets}
    for shared in holders.values():
        if len(shared) > 1 and not paths.isdisjoint(shared):
            raise ModelError(
                f"{' and '.join(shared)} are tied: they hold one weight. Give each its own before oelm.apply"
            )


def block_parameters(model: nn.Module, sites: Iterable[Site]) -> dict[int, nn.Parameter]:
    """Return the parameters of the blocks (embeddings and head not included), each once, by identity."""
    blocks = {site.block for site in sites}
    return {id(p): p for block in blocks for p in model.get_submodule(block).parameters()}


def _choose_sites(family: Family, sites: list[Site], method: Method) -> list[Site]:
    """Return the attentions that the method's `layers` and `attention` choose."""
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


def _core_sides(model: nn.Module, family: Family, method: Method) -> tuple[str, ...]:
    """Return which projections get the core: Q alone where Q and K meet only each other, else a matrix on each side.

    An identity key never gets a core, whatever it meets: the point of it is that the key is the hidden state itself.
    """
    if method.core == "none":
        return ()
    one_sided = method.core == "gain" or method.k.init == "identity" or family.meets(model.config) is None
    return ("q",) if one_sided else ("q", "k")


def _reaches(chosen: list[Site], method: Method) -> list[int]:
    """Return for each chosen site how many heads share a core; 0 stands for all of them."""
    if isinstance(method.reach, int):
        return [method.reach] * len(chosen)
    reaches: list[int] = []
    for kind in dict.fromkeys(site.kind for site in chosen):
        stack = [site for site in chosen if site.kind == kind]
        if isinstance(method.reach, str):
            wide = int(method.reach.removeprefix("first:"))
            # Where one block serves all layers, the stack has length 1 and any N covers it.
            if wide > len(stack) and not stack[0].shared:
                raise MethodError(f"reach {method.reach!r} does not fit the {len(stack)} {kind} layers of the method")
            reaches += [0 if index < wide else 1 for index in range(len(stack))]
        elif len(method.reach) == len(stack):
            reaches += method.reach
        else:
            raise MethodError(
                f"reach names {len(method.reach)} layers, and the method covers {len(stack)} {kind} layers: name each"
            )
    return reaches


def _projection_target(site: Site, role: str, method: Method, divisor: float | None, reach: int) -> list[Target]:
    """Return the target for a site's Q or K, or nothing where the method leaves that projection as it is."""
    spec = method.q if role == "q" else method.k
    if spec.untouched:
        return []
    factor = spec.scale
    keeps_length = spec.init in KEEPING or (method.core == "matrix" and spec.init in FACTORED)
    if role == "q" and not keeps_length and divisor is not None:
        # The attention does not divide its scores by sqrt(d_head) itself, so Q's rows carry what is missing.
        factor *= float(divisor * site.d_head**-0.5)
    heads = site.heads_of(role)
    blocks = 1 if spec.scope == "global" else heads
    path, reach = site.roles[role], reach or heads
    return [Target(site=site, role=role, path=path, spec=spec, blocks=blocks, factor=factor, reach=reach)]


def _latent_targets(site: Site, method: Method) -> list[Target]:
    """Return the targets for a site's latent and rotary channel. Raise where the method sets one that is not there."""
    targets = []
    if not method.down.untouched:
        path = _path_of(site, "down", "the matrix to a latent", "latent=256 (the width of the latent)")
        targets.append(Target(site=site, role="down", path=path, spec=method.down))
    if not method.channel.untouched:
        for role, blocks in (("channel_q", site.heads), ("channel_k", 1)):
            path = _path_of(site, role, "a rotary channel", "channel=32 (its dimensions)")
            targets.append(Target(site=site, role=role, path=path, spec=method.channel, blocks=blocks))
    return targets


def _path_of(site: Site, role: str, what: str, field: str) -> str:
    if role not in site.roles:
        raise MethodError(
            f"the method sets {what}, and {site.block} has none: build the project's GPT with the field {field}"
        )
    return site.roles[role]


def check(target: Target, method: Method, normed: Collection[str] = (), per_head: bool = True) -> None:
    """Raise where a matrix makes no sense for its site; the message names the numbers that do not fit.

    `normed` are the roles that the model normalises after their projection, each head by itself with `per_head`.
    """
    if isinstance(target.spec, Latent):
        _check_latent(target)
    if not isinstance(target.spec, Projection):
        return
    site, spec, where = target.site, target.spec, f"{target.path} ({target.role})"
    heads = site.heads_of(target.role)
    if target.role in normed and spec.scale != 1.0:
        raise MethodError(
            f"{where}: scale {spec.scale} has no effect, the norm after the projection cancels it; use scale 1"
        )
    if target.role in normed and per_head and method.core == "gain":
        raise MethodError(f"{where}: a gain has no effect, the norm after the projection cancels it; use core 'matrix'")
    width = site.width_of(target.role)
    if spec.init == "identity" and site.heads * site.d_head != width:
        what = "latent" if site.latent and target.role == "k" else "hidden size"
        raise MethodError(
            f"{where}: identity needs a {what} of heads x d_head, but {site.heads} x {site.d_head} "
            f"is not {width}; use init 'orthogonal'"
        )
    if spec.init in ORTHONORMAL - {"identity"}:
        _check_orthonormal(where, heads * site.d_head, width, site, spec)
    if method.core == "matrix" and spec.scope == "global" and spec.init in FACTORED:
        raise MethodError(f"{where}: a core per head needs a basis per head; use scope 'head'")
    if heads % target.reach:
        raise MethodError(f"{where}: reach {target.reach} does not divide its {heads} heads into groups")


def _check_latent(target: Target) -> None:
    """Raise where the latent cannot be the hidden state itself, or no Hadamard matrix of its width is known."""
    site, where = target.site, f"{target.path} ({target.role})"
    if target.spec.init == "identity" and site.latent != site.width:
        raise MethodError(
            f"{where}: identity needs a latent as wide as the hidden state, {site.width}, but it has {site.latent}: "
            f"build the model with latent={site.width}, or use init 'orthogonal'"
        )
    if target.spec.init == "hadamard":
        _check_hadamard(where, site.width)


def _check_orthonormal(where: str, rows: int, width: int, site: Site, spec: Projection) -> None:
    """Raise where rows of this width cannot be orthonormal, or no Hadamard matrix of that width is known."""
    if spec.scope == "global" and rows > width:
        raise MethodError(
            f"{where}: {rows} rows of width {width} cannot be orthonormal over all heads; use scope 'head'"
        )
    if site.d_head > width:
        raise MethodError(f"{where}: heads of {site.d_head} rows of width {width} cannot be orthonormal")
    if spec.init == "hadamard":
        _check_hadamard(where, width)


def _check_hadamard(where: str, width: int) -> None:
    try:
        hadamard_seed(width)
    except MethodError as error:
        raise MethodError(f"{where}: {error}") from None


def _up_to_share(model: nn.Module, sites: list[Site], targets: list[Target], ratio: float | str) -> list[Target]:
    """Return the first targets, in freezing order, whose weights make up the share of the blocks' parameters.

    Biases are not counted: a share is a share of matrices.
    """
    ordered = sorted(targets, key=lambda target: (_FREEZING_ORDER[target.role], -target.site.layer))
    if ratio == "qk":
        return [target for target in ordered if target.role in ("q", "k")]
    blocks = sum(p.numel() for p in block_parameters(model, sites).values())
    enough = float(ratio) - SHARE_TOLERANCE
    frozen, taken = 0, []
    for target in ordered:
        if frozen / blocks >= enough:
            break
        if target.role in ("q", "k"):  # the matrix may still be part of a fused one
            frozen += target.site.heads_of(target.role) * target.site.d_head * target.site.width_of(target.role)
        else:
            frozen += weight_matrix(model.get_submodule(target.path)).numel()
        taken.append(target)
    if frozen / blocks < enough:
        raise MethodError(
            f"freeze_ratio {ratio}: all of Q, K and the feed-forward matrices are only {frozen / blocks:.1%} "
            "of the blocks' parameters; ask for less"
        )
    return taken
