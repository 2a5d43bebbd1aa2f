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


def test_a_lock_can_be_claimed_while_another_process_tests_it(tmp_path):
    """`holder` takes the lock for an instant; a process that claims it just then tries again."""
    (tmp_path / "lock").touch()
    with open(tmp_path / "lock") as other:
        fcntl.flock(other, fcntl.LOCK_SH)
        threading.Timer(0.2, other.close).start()
        with hold(tmp_path):
            assert holder(tmp_path) == f"process {os.getpid()} on {HERE}"
    assert holder(tmp_path) is None


def test_a_process_waiting_for_a_removed_lock_file_is_refused_by_the_new_one(tmp_path):
    """The first holder removes the folder while a second waits; a third then holds the lock of the new folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    first, messages = hold(folder), []

    def wait():
        try:
            hold(folder, patience=1.0).close()
        except FileError as error:
            messages.append(str(error))

    waiting = threading.Thread(target=wait)
    waiting.start()
    time.sleep(0.2)
    shutil.rmtree(folder)
    folder.mkdir()
    with hold(folder):
        first.close()
        waiting.join()
    (message,) = messages
    assert f"process {os.getpid()} on {HERE}" in message
    assert str(folder) in message
    hold(folder).close()
