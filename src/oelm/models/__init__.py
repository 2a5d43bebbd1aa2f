"""Models: this project's GPT, a small random one of every family, any other by name; loading and exporting them."""

from . import gpt as gpt  # registers the GPT with transformers' Auto classes
