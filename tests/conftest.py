"""Settings for every test: one thread, so that results and times do not depend on the machine, and a quiet library."""

import pytest
import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()


@pytest.fixture
def process_group(tmp_path):
    """A group of one process, which is all that a wrapper for many needs."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/group", rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()
