"""A family of your own: tell oelm where a model's projections live, and check that you told it right.

The model here is a tiny decoder written from scratch, with grouped key-value heads, as a model type that neither
transformers nor oelm knows.
"""

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from transformers import PretrainedConfig, PreTrainedModel

import oelm


class PocketConfig(PretrainedConfig):
    model_type = "pocket"

    def __init__(self, width=64, depth=2, heads=4, kv_heads=2, vocab_size=99, **kwargs):
        self.width, self.depth, self.heads, self.kv_heads, self.vocab_size = width, depth, heads, kv_heads, vocab_size
        super().__init__(**kwargs)


class PocketBlock(nn.Module):
    def __init__(self, config):
        super().__init__()
        width, narrow = config.width, config.width // config.heads * config.kv_heads
        self.heads, self.kv_heads = config.heads, config.kv_heads
        self.query, self.key, self.value = nn.Linear(width, width), nn.Linear(width, narrow), nn.Linear(width, narrow)
        self.out, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.wide, self.back = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        h = self.norm(x)
        q = self.query(h).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = (f(h).unflatten(-1, (self.kv_heads, -1)).transpose(1, 2) for f in (self.key, self.value))
        mixed = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.back(torch.relu(self.wide(x)))


class PocketModel(PreTrainedModel):
    config_class = PocketConfig

    def __init__(self, config):
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.width)
        self.blocks = nn.ModuleList(PocketBlock(config) for _ in range(config.depth))
        self.head = nn.Linear(config.width, config.vocab_size)
        self.post_init()

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


oelm.register_family(
    "pocket",
    kind="decoder",
    block="blocks.*",
    q="query",
    k="key",
    v="value",
    o="out",
    ffn_in="wide",
    ffn_out="back",
    layers="depth",
    heads="heads",
    kv_heads="kv_heads",
)

# A check that the paths and the heads are right: oelm-exact changes nothing before the first step. This works where
# nothing else acts on Query and Key; say rotary=True or qk_norm=True where something does.
ids = torch.arange(3, 20)[None]
model = PocketModel(PocketConfig()).eval()
with torch.no_grad():
    before = model(ids)
    oelm.apply(model, "oelm-exact")
    torch.testing.assert_close(model(ids), before, atol=1e-5, rtol=1e-4)

model = PocketModel(PocketConfig())
print(oelm.apply(model, "oelm-freeze"))
optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-3)
for _ in range(5):
    loss = nn.functional.cross_entropy(model(ids)[0, :-1], ids[0, 1:])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
print(oelm.verify(model))
model.save_pretrained("pocket")
print(oelm.verify(oelm.load("pocket", model_class=PocketModel)))
