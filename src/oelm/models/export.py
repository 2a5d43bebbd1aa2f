"""Export a model as a plain transformers checkpoint that needs no oelm to load."""

from __future__ import annotations

import copy
import json
from itertools import chain
from os import PathLike
from pathlib import Path
from typing import Any

from huggingface_hub import create_repo, upload_folder
from torch import nn
from transformers import PreTrainedModel

from ..errors import CheckpointError, ModelError
from ..method.adapters import merge_adapters, merged_by_peft
from ..method.apply import check_operable
from ..method.fused import fuse
from ..method.projections import CoreProjection, IdentityProjection, SplitProjection
from ..method.seal import CARRIER, record_of, verify
from ..method.sites import find_sites, unwrapped
from .card import Training, write_card
from .convert import to_transformers
from .gpt import OelmGPTPreTrainedModel

# What `save_pretrained` takes about an upload.
_UPLOAD = ("repo_id", "private", "token", "revision", "create_pr", "commit_message", "commit_description")


def export(model: nn.Module, path: str | PathLike[str], *, training: Training | None = None, **options: Any) -> Path:
    """Write the model as a plain transformers checkpoint with the same outputs, loadable without oelm.

    Cores and adapters are folded into the matrices, those that peft added after `apply` too, identities written out,
    fused projections fused again; the project's own GPT becomes a GPT-2, GPT-NeoX, Llama, Qwen3 or DeepSeek-V3 by its
    config, and is refused where none of these holds it exactly. A model card, README.md, says what was frozen and,
    given `training`, how the model was trained; one that is there already is kept. `options` go to `save_pretrained`;
    with `push_to_hub=True` the folder is uploaded with its card, to `repo_id` or its own name. The model itself is not
    changed. Returns the folder.
    """
    push = options.pop("push_to_hub", False)
    upload = {name: options.pop(name) for name in _UPLOAD if name in options} if push else {}
    bare = unwrapped(model)
    check_operable(bare)
    if not isinstance(bare, PreTrainedModel):
        raise ModelError(f"{type(bare).__name__} is not a transformers model: no checkpoint format to export to")
    out = Path(path)
    if out.is_file():
        raise CheckpointError(f"{out} is a file; name a folder")
    if _has_record(out):
        raise CheckpointError(f"{out} holds a model that oelm.load can load, and an export cannot: name another folder")
    if record_of(bare) is not None:
        verify(bare)
    plain: Any = merged_by_peft(model) if hasattr(bare, "peft_config") else copy.deepcopy(bare)
    make_plain(plain)
    if isinstance(plain, OelmGPTPreTrainedModel):
        plain = to_transformers(plain)
    plain.save_pretrained(out, **options)
    write_card(out, bare, plain, training)
    if push:
        _upload(out, **upload)
    return out


def _has_record(folder: Path) -> bool:
    """Return True where an export would write a plain model over one with a record."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return isinstance(config, dict) and config.get("oelm") is not None


def _upload(
    folder: Path,
    repo_id: str | None = None,
    private: bool | None = None,
    token: str | bool | None = None,
    **commit: Any,
) -> None:
    """Upload the folder as it is: save_pretrained would put a card of its own in the place of the one written here."""
    repository = create_repo(repo_id or folder.resolve().name, private=private, token=token, exist_ok=True)
    upload_folder(repo_id=repository.repo_id, folder_path=folder, token=token, **commit)


def make_plain(model: nn.Module) -> None:
    """Remove a method from a model in place: same outputs, plain modules, everything trainable, no record."""
    merge_adapters(model)
    _, sites = find_sites(model)
    for site in sites:
        value = model.get_submodule(site.roles["v"]) if site.fused is None else model.get_submodule(site.fused_path)
        # Where K = V is an identity, it has no parameter of its own: the block's tell the dtype and the device.
        like = next(chain(value.parameters(), model.get_submodule(site.block).parameters()))
        for role in ("q", "k", "down"):
            try:
                module = model.get_submodule(site.roles.get(role, ""))
            except AttributeError:
                continue  # the projection is still fused: nothing was put in its place
            if isinstance(module, CoreProjection | IdentityProjection):
                model.set_submodule(site.roles[role], module.plain(like))
        if isinstance(value, SplitProjection):
            model.set_submodule(site.fused_path, fuse(value, site.heads))
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    if hasattr(model.config, "oelm"):
        del model.config.oelm
    if hasattr(model, CARRIER):
        delattr(model, CARRIER)
