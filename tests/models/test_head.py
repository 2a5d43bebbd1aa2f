"""The GPT's head: a product that is filled up to whole blocks gives the logits and gradients of the plain one."""

import pytest
import torch
from torch.nn import functional as F

from oelm.models.head import OelmGPTHead, filled_product


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
