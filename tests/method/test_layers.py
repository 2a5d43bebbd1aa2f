"""The modules for a user's own networks: orthonormal, frozen under weight decay, and equal to torch's attention."""

import pytest
import torch
from torch import nn

from oelm.errors import MethodError
from oelm.method.layers import OrthogonalLinear, OrthogonalMultiHeadAttention
from oelm.method.matrices import orthogonality_error
from tests.support.models import distance


@pytest.mark.parametrize(
    ("width", "rows", "heads"), [(8, 8, 1), (16, 8, 1), (8, 24, 1), (24, 24, 4), (32, 8, 2), (5, 7, 1)]
)
@pytest.mark.parametrize("freeze", [True, False])
def test_an_orthogonal_linear_is_orthonormal_and_frozen_or_not(width, rows, heads, freeze):
    torch.manual_seed(0)
    layer = OrthogonalLinear(width, rows, freeze=freeze, heads=heads)
    assert layer.weight.shape == (rows, width)
    for block in layer.weight.detach().view(heads, rows // heads, width):
        assert orthogonality_error(block, 1) < 1e-5
    assert layer.weight.requires_grad is not freeze
    assert layer.bias.requires_grad
    assert float(layer.bias.detach().abs().max()) == 0
    hidden = torch.randn(3, width)
    torch.testing.assert_close(layer(hidden), hidden @ layer.weight.T)
    assert OrthogonalLinear(width, rows, bias=False, heads=heads).bias is None
    assert f"heads={heads}, freeze={freeze}" in repr(layer)


def test_the_weight_is_drawn_from_torchs_global_generator():
    torch.manual_seed(1)
    first = OrthogonalLinear(8, 8)
    torch.manual_seed(1)
    assert torch.equal(first.weight, OrthogonalLinear(8, 8).weight)
    assert not torch.equal(first.weight, OrthogonalLinear(8, 8).weight)


@pytest.mark.parametrize(("rows", "heads"), [(8, 3), (8, 0), (8, -1)])
def test_heads_that_do_not_divide_are_refused(rows, heads):
    with pytest.raises(MethodError, match=f"8 rows .* {heads} heads"):
        OrthogonalLinear(8, rows, heads=heads)


@pytest.mark.parametrize(("width", "rows"), [(-1, 4), (4, -1), (0, 4), (4, 0)])
def test_sizes_below_one_are_refused(width, rows):
    with pytest.raises(MethodError, match=f"in_features {width} and out_features {rows}"):
        OrthogonalLinear(width, rows)


def test_the_name_of_the_study_for_the_drawing_is_understood():
    torch.manual_seed(1)
    first = OrthogonalLinear(8, 8, bias=False, ortho_method="qr", freeze=True)
    torch.manual_seed(1)
    assert torch.equal(first.weight, OrthogonalLinear(8, 8, bias=False).weight)
    with pytest.raises(MethodError, match="ortho_method 'householder': use 'qr'"):
        OrthogonalLinear(8, 8, ortho_method="householder")
    with pytest.raises(MethodError, match="bias must be True or False, not 'qr'; name ortho_method"):
        OrthogonalLinear(8, 8, "qr")
    with pytest.raises(MethodError, match="freeze must be True or False, not 'qr'"):
        OrthogonalLinear(8, 8, True, "qr")


@pytest.mark.parametrize("heads", [3, 0])
def test_attention_heads_that_do_not_divide_are_refused(heads):
    with pytest.raises(MethodError, match=f"d_model 16 .* {heads} heads"):
        OrthogonalMultiHeadAttention(16, heads)
    with pytest.raises(MethodError, match="in_features -16 and out_features -16"):
        OrthogonalMultiHeadAttention(-16, 2)


@pytest.mark.parametrize("freeze", [True, False])
def test_query_and_key_stay_frozen_under_adamw_with_weight_decay(freeze):
    torch.manual_seed(0)
    layer = OrthogonalMultiHeadAttention(16, 4, freeze_qk=freeze, bias=True)
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.5)
    for _ in range(5):
        optimizer.zero_grad()
        layer(torch.randn(2, 6, 16)).square().sum().backward()
        optimizer.step()
    changed = {name for name, p in layer.named_parameters() if not torch.equal(p, before[name])}
    frozen = {"q_proj.weight", "k_proj.weight"} if freeze else set()
    # A key's bias shifts all scores of a row equally, which the softmax cancels: only rounding may change it.
    assert changed | {"k_proj.bias"} == (set(before) - frozen) | {"k_proj.bias"}
    if freeze:
        for projection in (layer.q_proj, layer.k_proj):
            for block in projection.weight.view(4, 4, 16):
                assert orthogonality_error(block, 1) < 1e-5


def test_outputs_equal_those_of_torchs_multi_head_attention():
    """With the same matrices, with a causal mask and without."""
    torch.manual_seed(0)
    layer = OrthogonalMultiHeadAttention(16, 4).eval()
    reference = nn.MultiheadAttention(16, 4, bias=False, batch_first=True).eval()
    with torch.no_grad():
        reference.in_proj_weight.copy_(torch.cat([layer.q_proj.weight, layer.k_proj.weight, layer.v_proj.weight]))
        reference.out_proj.weight.copy_(layer.o_proj.weight)
        hidden = torch.randn(2, 6, 16)
        assert distance(layer(hidden), reference(hidden, hidden, hidden)[0]) < 1e-5
        future = torch.ones(6, 6, dtype=torch.bool).triu(1)
        expected = reference(hidden, hidden, hidden, attn_mask=future)[0]
        assert distance(layer(hidden, is_causal=True), expected) < 1e-5
        assert distance(layer(hidden, mask=~future), expected) < 1e-5
        assert distance(layer(hidden), expected) > 1e-3


def test_dropout_acts_only_in_training():
    torch.manual_seed(0)
    layer, hidden = OrthogonalMultiHeadAttention(16, 4, dropout=0.5), torch.randn(2, 6, 16)
    assert distance(layer(hidden), layer(hidden)) > 1e-3
    layer.eval()
    assert torch.equal(layer(hidden), layer(hidden))


def test_attention_learns_within_a_network_and_its_state_dict_can_be_loaded():
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 16), OrthogonalMultiHeadAttention(16, 2), nn.Linear(16, 1))
    inputs = torch.randn(32, 5, 4)
    targets = inputs[:, :, :1].cumsum(1)
    optimizer = torch.optim.AdamW([p for p in network.parameters() if p.requires_grad], lr=0.01)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (network(inputs) - targets).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]
    copy = nn.Sequential(nn.Linear(4, 16), OrthogonalMultiHeadAttention(16, 2), nn.Linear(16, 1))
    copy.load_state_dict(network.state_dict())
    assert torch.equal(copy(inputs), network(inputs))
    assert not copy[1].q_proj.weight.requires_grad
