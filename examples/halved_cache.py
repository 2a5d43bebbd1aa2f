"""Serve a GPT-2 with half the cache: it keeps one hidden state per token instead of a key and a value.

Nothing is trained and the answers are the same. The model here is random and small; with a network, use
GPT2LMHeadModel.from_pretrained("gpt2").
"""

import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel

import oelm

torch.manual_seed(0)
config = GPT2Config(n_embd=256, n_layer=4, n_head=8, vocab_size=1000, bos_token_id=1, eos_token_id=2)
model = GPT2LMHeadModel(config).eval()
prompts = torch.randint(0, 1000, (4, 200))


def serve():
    """Return the generated ids and the bytes that the cache took."""
    cache = DynamicCache(config=config)
    mask = torch.ones_like(prompts)
    ids = model.generate(
        prompts, attention_mask=mask, past_key_values=cache, max_new_tokens=50, do_sample=False, pad_token_id=0
    )
    held = (tensor for layer in cache.layers for tensor in (layer.keys, layer.values))
    return ids, sum(tensor.numel() * tensor.element_size() for tensor in held)


before, full = serve()
oelm.halve_cache(model)
after, half = serve()
assert torch.equal(after, before)
print(f"the cache takes {half / 1e6:.1f} MB instead of {full / 1e6:.1f} MB, and the {after.numel():,} ids are the same")

oelm.restore_cache(model)  # keys and values again
assert serve()[1] == full
