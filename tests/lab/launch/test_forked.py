"""Runs as processes forked from one that has imported torch."""

import os
import signal

import pytest

from oelm.base.machine import threads_each
from oelm.cli.train import train_and_exit
from oelm.lab.launch.forked import ForkedLauncher
from oelm.lab.matrix import Matrix
from oelm.lab.status import read_state
from tests.support.lab import longer_config, plan, train_uninterrupted
from tests.support.training import read, result_without_times


@pytest.mark.timeout(300)
def test_forked_runs_finish_have_their_own_session_and_save_when_stopped(tmp_path):
    """Their results have the same fields as those of runs in one process."""
    planned = plan(tmp_path, axes={"seed": [0, 1]})
    assert Matrix(planned, ForkedLauncher(2, train_and_exit)).run() == {"finished": 2}
    for name, folder in train_uninterrupted(planned, tmp_path / "uninterrupted").items():
        threads = read(tmp_path / "runs" / name / "environment.json")["cpu"]["threads"]
        assert threads == threads_each(2)
        assert result_without_times(tmp_path / "runs" / name).keys() == result_without_times(folder).keys()
    (slow,) = plan(tmp_path, "slow", axes={"seed": [0]}, config=longer_config(tmp_path, 5000, 10_000))
    work = Matrix([slow], ForkedLauncher(1, train_and_exit))

    def stop(_: Matrix) -> None:
        pid = read_state(slow.folder).pid
        if pid is not None and not work.stopped:
            assert os.getsid(pid) == pid != os.getsid(0), "a session of its own, which Ctrl-C does not reach"
            os.kill(os.getpid(), signal.SIGINT)

    assert work.run(stop) == {"stopped": 1}
