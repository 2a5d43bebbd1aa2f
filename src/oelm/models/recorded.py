"""The structure of the method that a saved model's config records: cores, identities, adapters."""

from __future__ import annotations

from torch import nn

from ..method.apply import install
from ..method.seal import read_record
from ..method.spec import Method


def install_recorded_method(model: nn.Module) -> None:
    """Give a newly built model the structure of the method that its config records, if it records one.

    The structure is there before the weights are loaded, so pipelines and evaluation harnesses, which do not know
    oelm, load a saved model completely. Only `oelm.load` also freezes and verifies it.
    """
    record = read_record(model.config)
    if record is not None:
        install(model, Method.load(record["method"]))
