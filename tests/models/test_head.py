"""The GPT's head: its filled product and its own pass for the loss give the plain logits, losses and gradients."""

import pytest
import torch
from torch.nn import functional as F

from oelm.models.head import OelmGPTHead, filled_product
from tests.support.interpreter import error_in_the_interpreter


@pytest.mark.parametrize("vocabulary", [63, 64, 65, 257])
def test_a_filled_product_has_the_logits_and_gradients_of_the_plain_one(vocabulary):
    generator = torch.Generator().manual_seed(vocabulary)
    hidden = torch.randn(3, 5, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    weight = torch.randn(vocabulary, 16, dtype=torch.float64, generator=generator, requires_grad=True)
    gradient = torch.randn(3, 5, vocabulary, dtype=torch.float64, generator=generator)
    results = []
    for product in (F.linear, filled_product):
        logits = product(hidden, weight)
        results.append((logits, *torch.autograd.grad(logits, (hidden, weight), gradient)))
    for plain, filled in zip(*results, strict=True):
        assert filled.shape == plain.shape
        torch.testing.assert_close(filled, plain, atol=1e-12, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
def test_the_head_on_a_gpu(compiled):
    torch.manual_seed(0)
    head = OelmGPTHead(64, 777).cuda()
    called = torch.compile(head) if compiled else head
    for rows in (4, 2048):
        hidden = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16)
        with torch.autocast("cuda", torch.bfloat16):
            logits = called(hidden)
        plain = hidden.float() @ head.weight.bfloat16().float().T
        torch.testing.assert_close(logits.float(), plain, atol=0.05, rtol=0.02)
        (gradient,) = torch.autograd.grad(F.cross_entropy(logits.float(), torch.arange(rows).cuda() % 777), head.weight)
        assert gradient.shape == head.weight.shape
        assert gradient.abs().sum(-1).ne(0).all() or rows == 4


def sums_and_gradients(head, hidden, targets, joint: bool) -> list[torch.Tensor]:
    """Return the head's summed loss and its gradients, by its own pass or by logits that torch computes."""
    hidden = hidden.detach().requires_grad_()
    if joint:
        loss = head(hidden, targets)
    else:
        loss = F.cross_entropy(head(hidden).flatten(0, -2).float(), targets.flatten(), reduction="sum")
    trained = [tensor for tensor in (hidden, head.weight) if tensor.requires_grad]
    return [loss.detach(), *torch.autograd.grad(loss / 7, trained)]


def test_the_loss_on_a_cpu_is_that_of_the_logits():
    torch.manual_seed(0)
    head, targets = OelmGPTHead(16, 65), torch.randint(0, 65, (3, 5))
    targets[1, 2] = -100
    hidden = torch.randn(3, 5, 16)
    for own, expected in zip(
        *(sums_and_gradients(head, hidden, targets, joint) for joint in (True, False)), strict=True
    ):
        assert torch.equal(own, expected)


def largest_error(columns: int, classes: int) -> float:
    """Return the largest error of the kernel's losses and gradients, and of the gradient 0 that filling should have."""
    from oelm.models.head_kernel import replace_by_gradient

    generator = torch.Generator().manual_seed(columns)
    logits = 4 * torch.randn(6, columns, generator=generator)
    targets = torch.tensor([0, classes - 1, -100, 7, classes // 2, -100])
    rows = logits[:, :classes].clone().requires_grad_()
    losses = F.cross_entropy(rows, targets, reduction="none")
    (gradient,) = torch.autograd.grad(losses.sum(), rows)
    errors = [losses - replace_by_gradient(logits, targets, classes, -100)]
    errors += [gradient - logits[:, :classes], logits[:, classes:]]
    return max(error.abs().max().item() for error in errors if error.numel())


@pytest.mark.parametrize(
    ("columns", "classes"),
    [(64, 50), *(pytest.param(*shape, marks=pytest.mark.full) for shape in ((128, 128), (20_032, 20_001)))],
)
def test_the_kernel_gives_the_loss_and_its_gradient(columns, classes):
    assert error_in_the_interpreter(__name__, f"largest_error({columns}, {classes})") < 2e-6


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("at_a_time", [2**40, 2**20])
def test_the_loss_on_a_gpu_is_that_of_the_logits(compiled, trained, at_a_time, monkeypatch):
    monkeypatch.setattr("oelm.models.head_loss._MOST_BYTES", at_a_time)
    torch.manual_seed(0)
    torch._dynamo.reset()
    head = OelmGPTHead(64, 777).cuda()
    head.weight.requires_grad_(trained)
    targets = torch.randint(0, 777, (4, 1000), device="cuda")
    targets[1, 100:300] = -100
    hidden = torch.randn(4, 1000, 64, device="cuda")
    joint = torch.compile(sums_and_gradients) if compiled else sums_and_gradients
    # In float64 as the truth: the joint pass is not to be further from it than torch's own operations in bfloat16.
    truth = sums_and_gradients(head.double(), hidden.double(), targets, joint=False)
    head.float()
    with torch.autocast("cuda", torch.bfloat16):
        plain = sums_and_gradients(head, hidden, targets, joint=False)
        own = joint(head, hidden, targets, joint=True)
    assert len(own) == (3 if trained else 2)
    for ours, theirs, true in zip(own, plain, truth, strict=True):
        assert ours.dtype == theirs.dtype
        size = true.abs().max()
        assert (ours - true).abs().max() <= 1.5 * (theirs - true).abs().max() + 1e-4 * size
