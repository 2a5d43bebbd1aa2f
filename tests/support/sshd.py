"""An ssh server on the loopback device, with keys and a configuration of its own, and an `ssh` that finds it."""

from __future__ import annotations

import getpass
import os
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from tests.support.distributed import free_port, wait_until

# What the user's own ssh configuration calls the machine.
NAME = "pretend"
SERVER = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
_PRIVILEGES = Path("/run/sshd")


def why_not() -> str:
    """Return why there can be no server here, or an empty string."""
    missing = [name for name in ("ssh", "ssh-keygen", "tar", "find") if shutil.which(name) is None]
    if SERVER is None or missing:
        return f"needs OpenSSH's server and client; missing: {', '.join([*([] if SERVER else ['sshd']), *missing])}"
    if os.getuid() == 0 and not _PRIVILEGES.is_dir():
        with suppress(OSError):
            _PRIVILEGES.mkdir(mode=0o755)
        if not _PRIVILEGES.is_dir():
            return f"sshd as root needs the folder {_PRIVILEGES}"
    return ""


class Server:
    """A running server. `oelm` and a `home` of its own are what a login finds there."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.port = folder, free_port()
        self.process: subprocess.Popen[bytes] | None = None
        for name in ("server", "user"):
            command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(command, check=True, capture_output=True)
        shutil.copyfile(folder / "user.pub", folder / "authorized")
        self.home = folder / "home"
        self.home.mkdir()
        # A login begins in the user's home folder, which is not a test's, so each command goes to another first.
        login = folder / "login"
        login.write_text(
            "#!/bin/sh\n"
            f"export HOME={shlex.quote(str(self.home))} OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1\n"
            'cd "$HOME"; echo "Welcome to the machine"\n'
            'exec sh -c "$SSH_ORIGINAL_COMMAND"\n'
        )
        login.chmod(0o755)
        settings = {
            "ListenAddress": "127.0.0.1",
            "Port": self.port,
            "HostKey": folder / "server",
            "AuthorizedKeysFile": folder / "authorized",
            "PidFile": "none",
            "StrictModes": "no",
            "UsePAM": "no",
            "PasswordAuthentication": "no",
            "KbdInteractiveAuthentication": "no",
            "PermitRootLogin": "prohibit-password",
            "AllowUsers": getpass.getuser(),
            "ForceCommand": login,
        }
        (folder / "sshd_config").write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
        self._configure_user()

    def _configure_user(self) -> None:
        key = (self.folder / "server.pub").read_text().split()
        (self.folder / "known").write_text(f"[127.0.0.1]:{self.port} {key[0]} {key[1]}\n")
        settings = {
            "HostName": "127.0.0.1",
            "Port": self.port,
            "User": getpass.getuser(),
            "IdentityFile": self.folder / "user",
            "IdentitiesOnly": "yes",
            "IdentityAgent": "none",
            "UserKnownHostsFile": self.folder / "known",
            "StrictHostKeyChecking": "yes",
            "BatchMode": "yes",
        }
        lines = [f"Host {NAME}", *(f"    {key} {value}" for key, value in settings.items())]
        (self.folder / "ssh_config").write_text("\n".join(lines) + "\n")
        programs = self.folder / "bin"
        programs.mkdir()
        # ssh takes the user's configuration from the home folder of the system's list of users, not from $HOME.
        ssh = programs / "ssh"
        ssh.write_text(
            f'#!/bin/sh\nexec {shutil.which("ssh")} -F {shlex.quote(str(self.folder / "ssh_config"))} "$@"\n'
        )
        ssh.chmod(0o755)
        oelm = programs / "oelm on the host"
        oelm.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m oelm "$@"\n')
        oelm.chmod(0o755)
        self.oelm = oelm

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        assert SERVER is not None
        command = [SERVER, "-D", "-e", "-f", str(self.folder / "sshd_config")]
        with open(self.folder / "sshd.log", "ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self._answers, 30)

    def stop(self) -> None:
        """End the server, and every connection to it."""
        if self.process is not None:
            for session in self._sessions():
                with suppress(ProcessLookupError):
                    os.kill(session, 9)
            self.process.terminate()
            self.process.wait()
            self.process = None

    def _sessions(self) -> list[int]:
        assert self.process is not None
        pid = self.process.pid
        children = Path(f"/proc/{pid}/task/{pid}/children")
        return [int(child) for child in children.read_text().split()] if children.exists() else []

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, (self.folder / "sshd.log").read_text()
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


@contextmanager
def server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Yield a running server that this process's `ssh` finds by NAME; skip the test where there can be none."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder.mkdir()
    running = Server(folder)
    monkeypatch.setenv("PATH", f"{running.folder / 'bin'}:{os.environ['PATH']}")
    running.start()
    try:
        yield running
    finally:
        running.stop()
