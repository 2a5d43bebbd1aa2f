"""Locks on folders: taken, tested and released."""

import fcntl
import os
import shutil
import socket
import threading
import time

from oelm.base.locks import hold, holder
from oelm.errors import FileError

HERE = socket.gethostname()


def test_testing_a_lock_does_not_make_a_claim_fail(tmp_path):
    """`holder` takes the lock for an instant; a process that claims it just then tries again."""
    (tmp_path / "lock").touch()
    with open(tmp_path / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        threading.Timer(0.2, other.close).start()
        with hold(tmp_path):
            assert holder(tmp_path) == f"process {os.getpid()} on {HERE}"
    assert holder(tmp_path) is None


def test_a_removed_lock_file_does_not_count_as_held(tmp_path):
    """The holder removes the folder while another waits for its lock, and a third has the lock of the new folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    first, refused = hold(folder), []

    def wait():
        try:
            hold(folder, patience=1.0).close()
        except FileError as error:
            refused.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    shutil.rmtree(folder)
    folder.mkdir()
    with hold(folder):
        first.close()
        waiting.join()
    assert refused == [f"{folder}: in use by process {os.getpid()} on {HERE}"]
    hold(folder).close()
