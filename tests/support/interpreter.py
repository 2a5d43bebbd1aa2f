"""Runs a Triton kernel in Triton's interpreter, where numpy computes it line by line: its arithmetic needs no GPU."""

import os
import subprocess
import sys

import pytest


def error_in_the_interpreter(module: str, call: str) -> float:
    """Return what `call`, a function of a test module with its arguments, returns where kernels are interpreted.

    It needs a process of its own: whether kernels are interpreted is decided when they are imported.
    """
    pytest.importorskip("triton")
    code = f"import torch; from {module} import {call.partition('(')[0]}; print({call})"
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return float(done.stdout)
