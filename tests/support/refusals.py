"""Which presets do not fit which small models, and what their refusals say."""

import itertools

from oelm.models.small import SMALL

# (small model, preset) -> part of the message with which the preset is refused for the model.
REFUSED = {
    ("albert", "last-layers"): "this model has one block for all its layers",
    ("albert", "freeze-early"): "this model has one attention module for all its layers",
}
# Models whose heads together are wider than the hidden state.
WIDE = ("qwen3", "gemma", "gemma2", "gemma3")
REFUSED |= {(name, "oelm-global"): "64 rows of width 48 cannot be orthonormal over all heads" for name in WIDE}
SLICES = ("identity-query", "identity-key", "identity-core", "identity-wide")
REFUSED |= {(name, preset): "4 x 16 is not 48" for name in WIDE for preset in SLICES}
NORMED = ("qwen3", "gemma3", "olmo2")
DOUBLED = ("identity-query", "identity-key")
REFUSED |= {(name, preset): "the norm after the projection cancels it" for name in NORMED for preset in DOUBLED}
ENCODERS = ("t5", "bart", "whisper")
REFUSED |= {(name, "freeze-early"): "'except-first:2' does not fit a model of 2 layers" for name in ENCODERS}
REFUSED |= {("mixtral", preset): "the chosen attentions' blocks name none" for preset in ("oelm-qk-ffn", "oelm-ffn")}
# Models whose output layer is tied to the embedding have no separate head that could train alone.
TIED = ("gpt2", "gpt2-cross", "gpt_neo", "opt", "gemma", "gemma2", "gemma3", "starcoder2", "t5", "bart", "whisper")
TIED += ("falcon-rw", "falcon-7b", "falcon-40b")
TIED += tuple(name for name in SMALL if name.startswith("oelm-gpt"))
REFUSED |= {(name, "head-only"): "its output layer is its embedding" for name in TIED}
UNBIASED = ("mistral", "mixtral", "qwen3", "gemma", "gemma2", "gemma3", "olmo2", "phi3", "t5")
REFUSED |= {(name, "bitfit"): "has no biases" for name in UNBIASED}
REFUSED |= {(f"oelm-gpt-{form}", "bitfit"): "has no biases" for form in ("modern", "grouped", "latent")}
# Presets for models whose keys and values are read from a latent: no other model has the matrix that they set.
FOR_LATENTS = ("identity-channel", "latent-states", "latent-frozen", "latent-trained", "latent-random")
WITHOUT_LATENT = [name for name in SMALL if name != "oelm-gpt-latent"]
REFUSED |= dict.fromkeys(itertools.product(WITHOUT_LATENT, FOR_LATENTS), "the matrix to a latent")
