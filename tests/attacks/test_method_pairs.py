"""Every small model with every preset: exact through training, saving and loading, without one false alarm."""

import copy
import itertools
import random
import re
from collections import Counter

import pytest
import torch

import oelm
from oelm.method.diagnose import train_steps
from oelm.method.spec import PRESETS
from oelm.models.small import SMALL
from tests.support.models import assert_same_model, lively_model
from tests.support.refusals import REFUSED

PAIRS = sorted(itertools.product(SMALL, PRESETS))


def _verified(model, checks: Counter) -> None:
    """Require that `verify` passes to the bit, and that the record could be compared with its method."""
    verification = oelm.verify(model)
    assert verification.exact == verification.tensors
    assert verification.notes == ()
    checks["verify"] += 1
    checks["frozen tensors"] += verification.tensors


@pytest.mark.parametrize("part", range(5))
def test_every_pair_is_exact_or_refused_with_its_reason(part, rounds, tmp_path):
    pytest.importorskip("peft")
    pairs = random.Random("pairs").sample(PAIRS, len(PAIRS))[: rounds(125)][part::5]
    checks = Counter()
    for name, preset in pairs:
        model = lively_model(name)
        method = PRESETS[preset].resolve(100)
        if (name, preset) in REFUSED:
            with pytest.raises(oelm.MethodError, match=re.escape(REFUSED[name, preset])):
                oelm.apply(model, method)
            checks["refused"] += 1
            continue
        oelm.apply(model, method)
        _verified(model, checks)
        train_steps(model, 1, weight_decay=0.1)
        _verified(model.eval(), checks)
        model.save_pretrained(tmp_path / f"{name}-{preset}")
        loaded = oelm.load(tmp_path / f"{name}-{preset}")
        _verified(loaded, checks)
        assert_same_model(loaded, model)
        train_steps(loaded, 1)
        _verified(loaded, checks)
        narrow = copy.deepcopy(model).to(torch.bfloat16)
        assert oelm.verify(narrow).tensors == oelm.verify(narrow.to(torch.float32)).tensors
        checks["verify"] += 2
        checks["exact"] += 1
    print(f"{len(pairs)} pairs of model and method: {dict(checks)}")
