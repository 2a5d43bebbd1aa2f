"""Settings for every test: one thread, quiet libraries, and which tests the quick gate leaves to `make test-full`."""

import zlib
from collections import Counter, defaultdict

import pytest
import torch
import transformers

# One thread, so that results do not depend on the machine.
torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark as `full` every case that a test's `covering` sample does not need.

    `@pytest.mark.covering(3)` on a parametrised test keeps enough cases for each value of each parameter to be tried
    three times (each preset on three structures, each family on three presets). It runs before pytest applies `-m`.
    """
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("covering") is not None and hasattr(item, "callspec"):
            cases[item.function].append(item)
    for group in cases.values():
        for item in _outside_sample(group, *group[0].get_closest_marker("covering").args):
            item.add_marker(pytest.mark.full)


def _outside_sample(items, times=1):
    """Return the items whose parameter values have all been tried `times` times by other items."""
    tried, outside = Counter(), []
    # By a hash of the name: in the order of collection the first values would be paired with all others.
    for item in sorted(items, key=lambda item: zlib.crc32(item.name.encode())):
        values = [(name, _label(value, item)) for name, value in item.callspec.params.items()]
        if all(tried[value] >= times for value in values):
            outside.append(item)
        else:
            tried.update(values)
    return outside


def _label(value, item):
    return value if isinstance(value, str | int | float | bool | None) else item.callspec.id


@pytest.fixture
def process_group(tmp_path):
    """Start a process group of one process, which is all that a distributed wrapper needs."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
