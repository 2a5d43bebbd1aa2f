"""Models: this project's GPT, a small random one of every family, any other by name; loading and exporting them."""

from .gpt import build_hooks
from .load import install_recorded_method

build_hooks.append(install_recorded_method)
