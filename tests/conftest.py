"""Settings for every test: one thread, so that results and times do not depend on the machine, and a quiet library."""

import torch
import transformers

torch.set_num_threads(1)
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()
