# %% [markdown]
# # Your own text to a small GPT
#
# From a text file to tokens, a trained model, generated text and a plain checkpoint. Put your own text into `mine.txt`,
# with `<|endoftext|>` between documents; where that file is missing, one is made up.

# %%
from pathlib import Path

from transformers import AutoModelForCausalLM, AutoTokenizer

import oelm
from oelm.data import prepare, stories
from oelm.evaluation.training_facts import training_facts

text = Path("mine.txt")
if not text.exists():
    text.write_text("<|endoftext|>".join(stories(seed=0, count=1000)), encoding="utf-8")
data = prepare(text, "data/mine", train_bpe=1000, val_fraction=0.05)
print(f"{len(data.train):,} tokens to train on, {len(data.val):,} to validate on")

# %% [markdown]
# The identity as Key: one matrix less in every layer, and half the cache when text is generated. The same config as a
# file, `oelm train run.yaml`, does the same; a run that was killed goes on from its last checkpoint.

# %%
config = oelm.RunConfig.load(
    {
        "experiment": "mine",
        "model": {"name": "gpt:tiny", "fields": {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}},
        "method": "identity-key",
        "data": {"path": "data/mine", "sequence_length": 128},
        "optimizer": {"learning_rate": 2e-3, "warmup_steps": 10},
        "train": {"max_steps": 200, "batch_size": 16},
        "eval": {"every": 100},
        "checkpoint": {"every": 100},
    }
)
result = oelm.train(config)
print(f"perplexity {result['perplexity']:.1f} after {result['steps']} steps")

# %% [markdown]
# The exported folder is a plain GPT-2 with its tokenizer, and a model card with how it was trained and its figures.

# %%
best = config.folder / "best"
oelm.export(oelm.load(best), "plain-gpt", training=training_facts(config.folder))
AutoTokenizer.from_pretrained(best).save_pretrained("plain-gpt")

tokenizer = AutoTokenizer.from_pretrained("plain-gpt")
model = AutoModelForCausalLM.from_pretrained("plain-gpt")
prompt = tokenizer("anna has", return_tensors="pt")
print(tokenizer.decode(model.generate(**prompt, max_new_tokens=40, do_sample=False)[0]))
