"""Modules for networks of one's own: an orthogonal Linear, and attention with frozen Q and K."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..errors import MethodError
from .matrices import factor_qr


class OrthogonalLinear(nn.Linear):
    """A Linear whose weight has orthonormal rows (columns where it is taller than wide), frozen or not.

    `heads` splits the rows into blocks that are orthonormal each by itself. The matrix is Haar-distributed and drawn
    from torch's global generator, as the initial weights of every torch module are. `ortho_method` is the original
    study's name for how it is made, by QR.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        freeze: bool = True,
        heads: int = 1,
        *,
        ortho_method: str = "qr",
    ) -> None:
        if ortho_method != "qr":
            raise MethodError(
                f"ortho_method {ortho_method!r}: use 'qr', which draws from all orthonormal matrices alike"
            )
        for name, given in (("bias", bias), ("freeze", freeze)):
            if not isinstance(given, bool):
                raise MethodError(f"{name} must be True or False, not {given!r}; name ortho_method and what follows it")
        if in_features < 1 or out_features < 1:
            raise MethodError(f"in_features {in_features} and out_features {out_features} must both be above 0")
        if heads < 1 or out_features % heads:
            raise MethodError(f"{out_features} rows cannot be cut into {heads} heads of equal size")
        self.heads, self.freeze = heads, freeze
        super().__init__(in_features, out_features, bias)

    def reset_parameters(self) -> None:
        """Draw a new orthogonal weight and set the bias to zero; torch's constructor calls this."""
        drawn = torch.randn(self.out_features, self.in_features, dtype=torch.float32)
        with torch.no_grad():
            self.weight.copy_(factor_qr(drawn, self.heads)[1])
            if self.bias is not None:
                self.bias.zero_()
        self.weight.requires_grad_(not self.freeze)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, heads={self.heads}, freeze={self.freeze}"


class OrthogonalMultiHeadAttention(nn.Module):
    """Self-attention whose Query and Key are orthogonal per head and, by default, frozen; Value and output train."""

    def __init__(
        self, d_model: int, heads: int, freeze_qk: bool = True, bias: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        if heads < 1 or d_model % heads:
            raise MethodError(f"d_model {d_model} is not a multiple of {heads} heads")
        self.heads, self.dropout = heads, dropout
        self.q_proj = OrthogonalLinear(d_model, d_model, bias, freeze_qk, heads)
        self.k_proj = OrthogonalLinear(d_model, d_model, bias, freeze_qk, heads)
        self.v_proj = nn.Linear(d_model, d_model, bias)
        self.o_proj = nn.Linear(d_model, d_model, bias)

    def forward(self, hidden: Tensor, mask: Tensor | None = None, is_causal: bool = False) -> Tensor:
        """Return the attention's output for `hidden` (batch, length, d_model).

        `mask` and `is_causal` are those of torch's scaled_dot_product_attention.
        """
        projections = (self.q_proj, self.k_proj, self.v_proj)
        query, key, value = (p(hidden).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in projections)
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(query, key, value, mask, dropout, is_causal)
        result: Tensor = self.o_proj(out.transpose(1, 2).flatten(-2))
        return result
