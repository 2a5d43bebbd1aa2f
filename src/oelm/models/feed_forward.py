"""The GPT's feed-forward layers and norms."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from .attention.interface import ends_branch
from .gpt_config import OelmGPTConfig


class OelmGPTFeedForward(nn.Module):
    """Two linear layers with a GELU, or the square of a ReLU, between them."""

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        self.squared_relu = config.activation == "relu2"
        self.fc_in = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.biases)
        self.fc_out = ends_branch(nn.Linear(config.intermediate_size, config.hidden_size, bias=config.biases))

    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.fc_in(hidden)
        out: Tensor = self.fc_out(F.relu(inner).square() if self.squared_relu else F.gelu(inner))
        return out


class OelmGPTGatedFeedForward(nn.Module):
    """SwiGLU: a linear layer, multiplied by the SiLU of another one, and a third that reads the product."""

    def __init__(self, config: OelmGPTConfig) -> None:
        super().__init__()
        assert config.intermediate_size is not None
        self.gate = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.biases)
        self.fc_in = nn.Linear(config.hidden_size, config.intermediate_size, bias=config.biases)
        self.fc_out = ends_branch(nn.Linear(config.intermediate_size, config.hidden_size, bias=config.biases))

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = self.fc_out(F.silu(self.gate(hidden)) * self.fc_in(hidden))
        return out


def make_feed_forward(config: OelmGPTConfig) -> nn.Module:
    """Return the feed-forward layer of the config's activation."""
    return OelmGPTGatedFeedForward(config) if config.activation == "swiglu" else OelmGPTFeedForward(config)


def make_norm(config: OelmGPTConfig) -> nn.Module:
    """Return a norm over the width of the model."""
    if config.norm == "rms":
        return nn.RMSNorm(config.hidden_size, eps=config.layer_norm_eps)
    return nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps, bias=config.biases)
