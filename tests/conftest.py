"""Settings for every test: one thread, quiet libraries, and which tests the quick gate leaves to `make test-full`."""

import os
import zlib
from collections import Counter, defaultdict

import pytest
import torch
import transformers

# pytest-xdist tells its workers a terminal's width, and lists would be folded as in a terminal.
os.environ.pop("COLUMNS", None)
# One thread, so that results do not depend on the machine.
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark as `full` the cases of a parametrised test that the quick gate leaves out, before pytest applies `-m`.

    `@pytest.mark.covering(3)` keeps enough cases for each value of each parameter to be tried three times (each preset
    on three structures, each family on three presets). `@pytest.mark.sample(3)` keeps three cases.
    """
    cases = defaultdict(list)
    for item in items:
        cases[item.function].append(item)
    for group in cases.values():
        # By a hash of the name: in the order of collection the first values would be paired with all others.
        group.sort(key=lambda item: zlib.crc32(item.name.encode()))
        covering, sample = group[0].get_closest_marker("covering"), group[0].get_closest_marker("sample")
        outside = _outside_covering(group, *covering.args) if covering else group[sample.args[0] :] if sample else []
        for item in outside:
            item.add_marker(pytest.mark.full)


def _outside_covering(items, times):
    """Return the items whose parameter values have all been tried `times` times by the items before them."""
    tried, outside = Counter(), []
    for item in items:
        values = [(name, _label(value, item)) for name, value in item.callspec.params.items()]
        if all(tried[value] >= times for value in values):
            outside.append(item)
        else:
            tried.update(values)
    return outside


def _label(value, item):
    """Return a plain value itself, and the case's id for anything else, such as an object that cannot be hashed."""
    return value if isinstance(value, str | int | float | bool | None) else item.callspec.id


@pytest.fixture
def process_group(tmp_path):
    """Start a process group of one process, which is all that a distributed wrapper needs."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
