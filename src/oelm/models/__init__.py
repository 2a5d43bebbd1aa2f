"""Models: this project's GPT, a small random one of every family, any other by name; loading and exporting them."""

from .gpt import on_build
from .recorded import install_recorded_method

# Every OelmGPTModel gets the structure of the method that its config records.
on_build(install_recorded_method)
