"""Locks on folders: taken, tested and released."""

import fcntl
import os
import shutil
import socket
import threading
import time

from oelm.base.locks import hold, holder, holding_pid
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


def test_only_the_process_that_wrote_the_lock_is_taken_for_its_holder(tmp_path):
    assert holding_pid(tmp_path) is None
    with hold(tmp_path) as lock:
        assert holding_pid(tmp_path) == os.getpid()
        first, identity = (tmp_path / "lock").read_text().splitlines()
        boot, namespace, start = identity.split()
        for other in (
            f"{first}\n",
            f"{first}\n{boot} {namespace} {int(start) + 1}\n",
            f"{first}\n{boot} pid:[1] {start}\n",
            f"{first}\nanother-boot {namespace} {start}\n",
            f"process {os.getppid()} on {HERE}\n{identity}\n",
            f"process {os.getpid()} on another-machine\n{identity}\n",
            "nonsense\n",
        ):
            lock.truncate(0)
            lock.write(other)
            lock.flush()
            assert holding_pid(tmp_path) is None, other
            assert holder(tmp_path) == other.splitlines()[0]
    assert holding_pid(tmp_path) is None
