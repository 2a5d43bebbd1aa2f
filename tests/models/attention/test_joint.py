"""Projections of one input as one product: what each layer gives, and its gradients."""

import pytest
import torch
from torch import nn

from oelm.models.attention import joint
from oelm.models.attention.joint import project


class OnAGpu(torch.Tensor):
    """A tensor on the CPU that says that it is on a GPU."""

    is_cuda = True


def layers(frozen: set[int], special: set[int]) -> list[nn.Module]:
    """Return four layers, of which some are frozen, and some have a bias, a hook or another class."""
    torch.manual_seed(0)
    made: list[nn.Module] = [
        nn.Linear(8, width, bias=place in special and width == 4) for place, width in enumerate((8, 4, 6, 2))
    ]
    if 2 in special:
        made[2].register_forward_hook(lambda module, arguments, output: 2 * output)
    if 3 in special:
        made[3] = nn.Sequential(made[3], nn.Tanh())
    for place in frozen:
        made[place].requires_grad_(False)
    return made


@pytest.mark.parametrize("frozen", [set(), {0, 1}, {0, 1, 2, 3}, {3}])
@pytest.mark.parametrize("special", [set(), {1}, {2}, {1, 2, 3}])
def test_joined_projections_are_those_of_each_layer(frozen, special, monkeypatch):
    monkeypatch.setattr("torch.compiler.is_compiling", lambda: True)
    products = []
    linear = joint.F.linear
    monkeypatch.setattr(joint.F, "linear", lambda *inputs: products.append(inputs) or linear(*inputs))
    chosen = layers(frozen, special)
    hidden = torch.randn(2, 3, 8).requires_grad_()
    results = []
    for inputs in (hidden.as_subclass(OnAGpu), hidden):
        products.clear()
        outputs = project(inputs, chosen)
        results.append((len(products), [output.as_subclass(torch.Tensor) for output in outputs]))
        total = sum((output**2).sum() for output in results[-1][1])
        trained = [p for layer in chosen for p in layer.parameters() if p.requires_grad]
        results[-1][1].extend(torch.autograd.grad(total, [hidden, *trained]))
    (joined, own), (single, expected) = results
    assert (joined < single) is (len(special) < 3)  # one plain layer is not joined
    for ours, theirs in zip(own, expected, strict=True):
        torch.testing.assert_close(ours, theirs)
