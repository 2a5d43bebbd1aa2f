"""The `Method`: what is set, frozen, added and trained in a model.

A method is data: strict, hashable, JSON in and out. It knows nothing of any model; `plan` fits it to one.
"""

from __future__ import annotations

import json
import math
import re
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from ..base.strict import Strict, explain, merge
from ..errors import MethodError, nearest
from .presets import PRESET_FIELDS

Init = Literal["default", "orthogonal", "gaussian", "identity", "hadamard", "pretrained", "qr", "polar"]
FfnInit = Literal["default", "orthogonal", "gaussian", "pretrained", "qr", "polar"]
Kind = Literal["encoder", "decoder", "cross"]
Role = Literal["q", "k", "v", "o", "ffn_in", "ffn_out"]  # those that an adapter can be put on

# Inits that leave the weights as they are, and inits that give them orthonormal rows.
KEEPING: frozenset[str] = frozenset({"default", "pretrained"})
ORTHONORMAL: frozenset[str] = frozenset({"orthogonal", "identity", "hadamard", "qr", "polar"})
# Inits whose matrix does not depend on the old weights. A bias fitted to those would be noise, so it starts at zero.
FRESH: frozenset[str] = frozenset({"orthogonal", "gaussian", "hadamard"})
# Inits that split a weight into a basis and a coefficient, which a matrix core can start from.
FACTORED: frozenset[str] = frozenset({"qr", "polar"})

_LAYERS = re.compile(r"(except-)?(first|last):[1-9][0-9]*")
_REST = re.compile(r"trained|biases|head|last:[1-9][0-9]*")
_REACH = re.compile(r"first:[1-9][0-9]*")
# Defaults of an adapter: peft's rank and block size, and the usual scale (alpha / rank) of 2.
LORA_RANK, LORA_ALPHA, OFT_BLOCK = 8, 16.0, 32
# The number of terms of the Cayley transform's series in OFT's rotations: peft's default today, which may change.
OFT_TERMS = 5


class _Matrix(Strict, refusal=MethodError):
    """The fields that every matrix has: whether it is frozen, and the standard deviation of a Gaussian one."""

    frozen: bool = False
    std: Annotated[float, Field(gt=0, allow_inf_nan=False)] | Literal["matched"] | None = None

    @model_validator(mode="after")
    def _check_std(self) -> _Matrix:
        init = getattr(self, "init", None)
        if init == "gaussian" and self.std is None:
            raise ValueError("init 'gaussian' needs std: a number such as 0.02, or 'matched' for 1/sqrt(width)")
        if init != "gaussian" and self.std is not None:
            raise ValueError(f"std belongs to init 'gaussian', not to {init!r}")
        return self


class Projection(_Matrix):
    """How a Query or Key matrix is made and scaled, and whether it is frozen.

    `scale` is a factor on the projection's output. `scope` says over what rows are orthonormal: each head, or all.
    `std` belongs to `gaussian`: a number, or "matched" for 1/sqrt(width), the row length of an orthonormal matrix.
    """

    init: Init = "default"
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    scope: Literal["head", "global"] = "head"

    @model_validator(mode="after")
    def _check_identity(self) -> Projection:
        if self.init == "identity" and not self.frozen:
            raise ValueError("init 'identity' removes the matrix, so there is nothing to train: set frozen to true")
        return self

    @property
    def untouched(self) -> bool:
        """Return True when the matrix stays as it is and trains."""
        return self.init in KEEPING and not self.frozen and self.scale == 1.0


class FeedForward(_Matrix):
    """How both feed-forward matrices are made and whether they are frozen. Their biases always train."""

    init: FfnInit = "default"

    @property
    def untouched(self) -> bool:
        """Return True when the matrices stay as they are and train."""
        return self.init in KEEPING and not self.frozen


class Channel(FeedForward):
    """How the query and key matrices of a rotary channel are made, and whether they are frozen."""


class Latent(_Matrix):
    """How the matrix from the hidden state to the latent is made, and whether it is frozen.

    Its rows are orthonormal over the whole latent: that has no heads. A norm follows, so it has no scale.
    """

    init: Init = "default"

    @model_validator(mode="after")
    def _check_identity(self) -> Latent:
        if self.init == "identity" and not self.frozen:
            raise ValueError("init 'identity' removes the matrix, so there is nothing to train: set frozen to true")
        return self

    @property
    def untouched(self) -> bool:
        """Return True when the matrix stays as it is and trains."""
        return self.init in KEEPING and not self.frozen


class Schedule(Strict, refusal=MethodError):
    """Whether and when freezing changes during training.

    static      never
    unfreeze    at each of `steps`, `layers_each` more layers (a number, or all that are left) become trainable, from
                the top down or the bottom up
    freeze      everything trains until the one step in `steps`, and is frozen from then on at its values of that step

    `shares` of a run's steps may be given instead of steps; `Method.resolve` adds the steps that they are in one run.
    """

    kind: Literal["static", "unfreeze", "freeze"] = "static"
    steps: tuple[Annotated[int, Field(gt=0)], ...] = ()
    shares: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = ()
    order: Literal["top-down", "bottom-up"] = "top-down"
    layers_each: Annotated[int, Field(gt=0)] | Literal["all"] = 1

    @model_validator(mode="after")
    def _check_times(self) -> Schedule:
        for name, times in (("steps", self.steps), ("shares", self.shares)):
            if list(times) != sorted(set(times)):
                raise ValueError(f"{name} {list(times)} must rise: list each once, in ascending order")
        if self.steps and self.shares and len(self.steps) != len(self.shares):
            raise ValueError(f"steps {list(self.steps)} and shares {list(self.shares)}: give one of the two")
        times = self.steps or self.shares
        fits = {"static": not times, "unfreeze": bool(times), "freeze": len(times) == 1}
        if not fits[self.kind]:
            count = {"static": "none", "unfreeze": "at least one", "freeze": "exactly one"}[self.kind]
            name = "shares" if self.shares else "steps"
            raise ValueError(f"kind {self.kind!r} needs {count} of steps or of shares, not {name} {list(times)}")
        return self

    @model_serializer(mode="wrap")
    def _leave_out_unused_shares(self, serialize: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields without empty shares, so that methods without them keep their JSON and runs their ids."""
        fields: dict[str, Any] = serialize(self)
        return fields if self.shares else {name: value for name, value in fields.items() if name != "shares"}


class Adapter(Strict, refusal=MethodError):
    """What is added to frozen matrices and trained instead of them, as `peft` builds it.

    Either the whole body is frozen (`rest` is head or biases), or only the targets are, by q, k and ffn, and the rest
    trains.

    lora    a product of two thin matrices beside each target, times `alpha`/`rank`; zero at step 0. Rank 8, alpha 16
    oft     a rotation of each target's input, in blocks of `rank` coordinates; the identity at step 0. Without a rank:
            blocks of 32, or of the largest smaller size that divides the target's width

    `dropout` is on LoRA's input, and on OFT the share of blocks that a step leaves unrotated. `targets` are roles.
    """

    kind: Literal["none", "lora", "oft"] = "none"
    rank: Annotated[int, Field(gt=0)] | None = None
    alpha: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    targets: tuple[Role, ...] = ("q", "v")

    @model_validator(mode="after")
    def _check_kind(self) -> Adapter:
        if self.kind == "none":
            defaults = type(self).model_fields
            changed = [n for n in sorted(self.model_fields_set) if getattr(self, n) != defaults[n].default]
            if changed:
                raise ValueError(f"{', '.join(changed)} set without an adapter; set kind to 'lora' or 'oft'")
        if self.kind == "oft" and self.alpha is not None:
            raise ValueError(f"alpha {self.alpha:g} belongs to 'lora'; a rotation has no scale")
        if self.kind == "oft" and self.rank == 1:
            raise ValueError("rank 1 is a rotation in one dimension, which moves nothing: use blocks of 2 or more")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"targets {list(self.targets)}: name at least one role, each once")
        return self

    def size(self, width: int) -> int:
        """Return the rank of a LoRA, or the size of an OFT's blocks, for a matrix of this width."""
        if self.kind == "lora":
            return self.rank or LORA_RANK
        if self.rank is None:
            return next(size for size in range(min(OFT_BLOCK, width), 0, -1) if width % size == 0)
        return self.rank


class Method(Strict, refusal=MethodError):
    """One way to set and freeze a Transformer's attention, or to train another part of it instead.

    q, k, ffn      how those matrices are made, and whether they are frozen; in a model with a latent, k is the
                   matrix from the latent to the keys
    down, channel  the same for the matrix from the hidden state to the latent, and for a rotary channel's two
    core           what is trained between frozen Q and K: nothing, a gain per head, or a d_head x d_head matrix
    reach          how many neighbouring heads a matrix core reads and writes together: one number, one per chosen
                   layer, or first:N, which is all heads in the first N chosen layers and 1 above. With all heads it
                   is a whole trained matrix after the frozen basis
    biases         whether the biases of frozen Q and K are frozen with them (the reference counts do) or trained
    adapter        what is added to frozen matrices and trained instead of them: to a frozen body, or to frozen q, k
                   and ffn while the rest trains
    rest           what happens to every other parameter: trained, or all frozen but the biases, the last N blocks
                   (last:N) or nothing of the body (head); a task's own head always trains
    attention      which attentions: all, or some of encoder, decoder and cross
    layers         all, first:N, last:N, except-first:N, except-last:N, or a list of indices from 0
    freeze_ratio   freeze a share of the blocks' parameters instead: Q/K, then FFN-in, then FFN-out, each from the
                   last layer to the first, whole tensors; "qk" stops after all of Q/K
    schedule       whether what is frozen changes during training, and when
    """

    q: Projection = Projection()
    k: Projection = Projection()
    ffn: FeedForward = FeedForward()
    down: Latent = Latent()
    channel: Channel = Channel()
    core: Literal["none", "gain", "matrix"] = "none"
    reach: int | tuple[int, ...] | str = 1
    biases: Literal["frozen", "trained"] = "frozen"
    adapter: Adapter = Adapter()
    rest: str = "trained"
    attention: Literal["all"] | tuple[Kind, ...] = "all"
    layers: str | tuple[Annotated[int, Field(ge=0)], ...] = "all"
    freeze_ratio: Annotated[float, Field(gt=0, lt=1)] | Literal["qk"] | None = None
    schedule: Schedule = Schedule()

    @field_validator("reach", mode="before")
    @classmethod
    def _check_reach(cls, value: Any) -> Any:
        counts = value if isinstance(value, list | tuple) else [value]
        if isinstance(value, str) and _REACH.fullmatch(value):
            return value
        if not all(type(count) is int and count > 0 for count in counts):
            raise ValueError(f"{value!r}: use a whole number from 1, a list of them, or 'first:N' (N from 1)")
        return value

    @model_validator(mode="after")
    def _check_fields_together(self) -> Method:
        if isinstance(self.layers, str) and self.layers != "all" and not _LAYERS.fullmatch(self.layers):
            raise ValueError(
                f"layers {self.layers!r}: use 'all', 'first:N', 'last:N', 'except-first:N', 'except-last:N' "
                "(N from 1) or a list of indices"
            )
        if not isinstance(self.layers, str) and (not self.layers or len(set(self.layers)) < len(self.layers)):
            raise ValueError(f"layers {list(self.layers)}: name at least one layer, each once")
        if self.attention != "all" and (not self.attention or len(set(self.attention)) < len(self.attention)):
            raise ValueError(f"attention {list(self.attention)}: name at least one kind, each once")
        self._check_rest()
        if self.sets_nothing and (self.layers != "all" or self.attention != "all"):
            raise ValueError(
                "layers and attention choose where matrices and adapters are set, but none is: the method "
                "would change nothing. Set one, or use the preset 'baseline' as it is"
            )
        if self.core != "none" and not (self.q.frozen and self.k.frozen):
            raise ValueError(
                f"core {self.core!r} sits between two frozen bases; next to a trained Q or K it adds nothing: "
                "freeze both, or set core to 'none'"
            )
        if self.reach != 1 and self.core != "matrix":
            raise ValueError(f"reach {self.reach} belongs to core 'matrix', but core is {self.core!r}")
        self._check_schedule()
        self._check_freeze_ratio()
        return self

    def _check_schedule(self) -> None:
        """Raise where a schedule has nothing that it could freeze or unfreeze."""
        if self.schedule.kind != "static":
            if not any(matrix.frozen for matrix in self.matrices.values()):
                raise ValueError(f"schedule {self.schedule.kind!r} has nothing to act on: no matrix is frozen")
            if "identity" in (self.q.init, self.k.init, self.down.init):
                raise ValueError("an identity has no matrix that a schedule could freeze or unfreeze")
            if self.core != "none" and self.schedule.kind == "freeze":
                raise ValueError("schedule 'freeze' trains the bases first: it does not go with a core")

    def _check_freeze_ratio(self) -> None:
        """Raise where a share of the weights cannot be frozen matrix by matrix."""
        if self.freeze_ratio is not None:
            if self.layers != "all":
                raise ValueError("freeze_ratio chooses the layers itself: leave layers at 'all'")
            if not (self.q.frozen and self.k.frozen):
                raise ValueError("freeze_ratio freezes Q and K first: set frozen to true for both")
            if not (self.ffn.frozen or self.freeze_ratio == "qk"):
                raise ValueError("freeze_ratio also freezes feed-forward matrices: set ffn.frozen to true")
            if not (self.down.untouched and self.channel.untouched):
                raise ValueError("freeze_ratio freezes Q, K and feed-forward matrices: leave down and channel alone")
            if self.core != "none" or "identity" in (self.q.init, self.k.init):
                raise ValueError("freeze_ratio counts frozen weights; it does not go with a core or an identity")

    def _check_rest(self) -> None:
        """Raise where `rest`, which says what trains in a frozen body, contradicts another field."""
        if not _REST.fullmatch(self.rest):
            raise ValueError(f"rest {self.rest!r}: use 'trained', 'biases', 'head' or 'last:N' (N from 1)")
        adapter = self.adapter.kind
        if self.rest == "trained":
            if adapter != "none":
                self._check_adapter_beside_frozen()
            return
        if adapter != "none" and self.rest not in ("head", "biases"):
            raise ValueError(
                f"adapter {adapter!r} trains instead of a frozen body, but rest is {self.rest!r}: set rest to "
                f"'head' (or 'biases'), or start from the preset {adapter!r}"
            )
        setting = f"rest {self.rest!r}" if adapter == "none" else f"adapter {adapter!r}"
        if adapter == "none" and (self.layers != "all" or self.attention != "all"):
            raise ValueError(f"{setting} is about the whole model: leave layers and attention at 'all'")
        if not all(matrix.untouched for matrix in self.matrices.values()):
            names = ", ".join(self.matrices)
            raise ValueError(f"{setting} trains parts of the model as it is: leave {names} as they are")
        if self.freeze_ratio is not None or self.schedule.kind != "static":
            raise ValueError(f"{setting} defines what is frozen by itself: not allowed with freeze_ratio or a schedule")
        if self.biases != "frozen":
            raise ValueError(f"biases 'trained' is about frozen q and k; with {setting} use rest 'biases'")

    def _check_adapter_beside_frozen(self) -> None:
        """Raise unless every target of the adapter is a matrix that the method freezes, where the rest trains."""
        setting = f"adapter {self.adapter.kind!r}"
        if self.freeze_ratio is not None or self.schedule.kind != "static":
            raise ValueError(
                f"{setting} sits beside matrices that stay frozen: not allowed with freeze_ratio or a schedule"
            )
        for role in self.adapter.targets:
            if role in ("q", "k") and self.core != "none":
                raise ValueError(f"{setting} on {role}: core {self.core!r} already trains beside Q and K; use one")
            if role in ("q", "k") and getattr(self, role).init == "identity":
                raise ValueError(f"{setting} on {role}: init 'identity' has no matrix to put an adapter beside")
        q, k = (spec.frozen and spec.init != "identity" and self.core == "none" for spec in (self.q, self.k))
        fits = {"q": q, "k": k, "ffn_in": self.ffn.frozen, "ffn_out": self.ffn.frozen}
        trained = [role for role in self.adapter.targets if not fits.get(role, False)]
        if trained:
            possible = ", ".join(role for role, fit in fits.items() if fit) or "none"
            raise ValueError(
                f"{setting} on {', '.join(trained)} adds nothing beside a matrix that trains, and rest is 'trained': "
                f"set rest to 'head' (or 'biases'), or target only what the method freezes (here {possible})"
            )

    @classmethod
    def load(cls, value: Method | str | dict[str, Any]) -> Method:
        """Return a method from itself, a preset's name or a dict; `{"preset": NAME, ...}` changes a preset's fields."""
        if isinstance(value, Method):
            return value
        if isinstance(value, str):
            if value not in PRESETS:
                raise MethodError(f"unknown preset {value!r}.{nearest(value, PRESETS)} Presets: {', '.join(PRESETS)}")
            return PRESETS[value]
        if not isinstance(value, dict):
            raise MethodError(f"a method is a preset's name, an oelm.Method or a dict, not {type(value).__name__}")
        fields = dict(value)
        base = cls.load(fields.pop("preset")) if "preset" in fields else None
        try:
            return cls.model_validate(merge(base.model_dump(), fields) if base else fields)
        except ValidationError as error:
            raise MethodError(f"method: {explain(error, cls, also=('preset',))}") from None

    def resolve(self, total_steps: int) -> Method:
        """Return the method for a run of this many steps: with the steps that the schedule's shares are in it."""
        shares, given = self.schedule.shares, self.schedule.steps
        if not shares:
            return self
        # A share of 0.29 of 100 steps is step 29, though the product is slightly less.
        steps = tuple(max(1, math.floor(share * total_steps + 1e-9)) for share in shares)
        meaning = f"schedule.shares {list(shares)} of a run of {total_steps} steps are its steps {list(steps)}"
        if len(set(steps)) < len(steps) or steps[-1] >= total_steps:
            raise MethodError(f"{meaning}: the run is too short for them")
        if given not in ((), steps):
            raise MethodError(f"{meaning}, and schedule.steps are {list(given)}: set one of the two to []")
        return self.model_copy(update={"schedule": self.schedule.model_copy(update={"steps": steps})})

    def require_steps(self) -> None:
        """Raise when the schedule has shares of a run's steps that `resolve` did not turn into steps yet."""
        if self.schedule.shares and not self.schedule.steps:
            raise MethodError(
                f"schedule.shares {list(self.schedule.shares)} are shares of a run whose number of steps is not known "
                "here: use method.resolve(total_steps), or give schedule.steps instead"
            )

    @property
    def name(self) -> str:
        """Return the name of the preset that this is, in whatever run, or 'custom'."""
        method = self
        if self.schedule.shares:
            method = self.model_copy(update={"schedule": self.schedule.model_copy(update={"steps": ()})})
        return next((name for name, preset in PRESETS.items() if preset == method), "custom")

    @property
    def sets_nothing(self) -> bool:
        """Return True when no matrix is set, frozen by role or given an adapter."""
        return all(matrix.untouched for matrix in self.matrices.values()) and self.adapter.kind == "none"

    @property
    def matrices(self) -> dict[str, Projection | FeedForward | Latent]:
        """Return how every kind of matrix is made, by the name of its field."""
        return {"q": self.q, "k": self.k, "ffn": self.ffn, "down": self.down, "channel": self.channel}

    def to_json(self) -> str:
        """Return canonical JSON: two equal methods give the same bytes."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True, separators=(",", ":"))

    def choose_layers(self, count: int) -> tuple[int, ...]:
        """Return the indices of the chosen layers, out of `count`, in ascending order."""
        if self.layers == "all":
            return tuple(range(count))
        if not isinstance(self.layers, str):
            beyond = [layer for layer in self.layers if layer >= count]
            if beyond:
                raise MethodError(f"layers {beyond} are out of range: the model has layers 0 to {count - 1}")
            return tuple(sorted(self.layers))
        where, _, digits = self.layers.partition(":")
        every, number = tuple(range(count)), int(digits)
        if number > count or (number == count and where.startswith("except")):
            raise MethodError(f"layers {self.layers!r} does not fit a model of {count} layers")
        cut = -number if where.endswith("last") else number
        return every[:cut] if where in ("first", "except-last") else every[cut:]


PRESETS: MappingProxyType[str, Method] = MappingProxyType(
    {name: Method.model_validate(fields) for name, fields in PRESET_FIELDS.items()}
)
