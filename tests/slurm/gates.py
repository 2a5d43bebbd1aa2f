"""A plugin for the runs of the test: holds each at two of its steps until the test has done something to it.

In the folder that $OELM_GATES names, a run that is held has a file "held-JOB-STEP" with the name of its node. It goes
on when it gets a signal, or when there is a file "pass-JOB" or "pass-all". It is held at step 60 only if there is a
file "hold-60".
"""

import os
import time
from pathlib import Path

from oelm.training.signals import StopRequest
from oelm.training.step import Stepper

GATES = Path(os.environ["OELM_GATES"])
JOB = os.environ.get("SLURM_JOB_ID")
handle, step = StopRequest.handle, Stepper.step
signalled = False


def noting_handle(request, number, frame):
    global signalled
    signalled = True
    handle(request, number, frame)


def held_step(stepper, state):
    if state.step == 20 or (state.step == 60 and (GATES / "hold-60").exists()):
        file = GATES / f"held-{JOB}-{state.step}"
        file.write_text(os.environ["SLURMD_NODENAME"])
        while not signalled and not any((GATES / f"pass-{which}").exists() for which in (JOB, "all")):
            time.sleep(0.05)
        file.unlink(missing_ok=True)
    step(stepper, state)


if JOB is not None:  # the command that submits the jobs loads the plugin too
    StopRequest.handle, Stepper.step = noting_handle, held_step
