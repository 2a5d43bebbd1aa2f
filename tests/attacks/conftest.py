"""Attacks: damage of every kind, done many times at random. `make test-full` runs a sample, `make attacks` all.

Every attack counts what it did and what became of it, and prints that; `make attacks` shows the counts.
"""

import os
from pathlib import Path

import pytest

# How many times as many rounds `make attacks` does.
_FACTOR = int(os.environ.get("OELM_ATTACKS", "1"))


def pytest_collection_modifyitems(items):
    """Leave every attack to `make test-full`."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.full)


@pytest.fixture
def rounds():
    """Return how often to attack, given how often the sample in `make test-full` does."""
    return lambda sample: sample * _FACTOR
