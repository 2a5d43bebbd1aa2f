"""Another machine, reached by the system's ssh with the user's own configuration; its own `oelm` does the work."""

from __future__ import annotations

import hashlib
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO

from ...errors import LabError

# A user and a machine, or a name of the user's ssh configuration. A dash in front would make it an option of ssh.
_ADDRESS = re.compile(r"[A-Za-z0-9_.][A-Za-z0-9_.@:%\[\]+-]*")
# What ssh exits with when there is no connection, and shells where a command cannot be run.
_EXIT_UNREACHABLE, _EXIT_NO_COMMAND = 255, (126, 127)
# What the script below exits with where the folder is missing.
_EXIT_NO_FOLDER = 73
# The line that comes before everything that is wanted: the files that a shell reads at its start may print as well.
_START = "-- oelm --"
# Without these a connection that is gone is waited for without end.
_OPTIONS = ("-T", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
# Seconds for ssh to end after its output has.
_PATIENCE = 5


class UnreachableError(LabError):
    """A machine to which there is no connection, or no longer one. What runs there goes on."""


@dataclass(frozen=True)
class Host:
    """A machine.

    address     as ssh takes it: USER@MACHINE, or a name of the user's ssh configuration
    command     the path of its `oelm`
    folder      the folder in which commands run, from the home folder if it is relative
    """

    address: str
    command: str = "oelm"
    folder: str = ""

    def __post_init__(self) -> None:
        if not _ADDRESS.fullmatch(self.address):
            raise LabError(f"--host {self.address}: write it as USER@MACHINE, or as a name of your ssh configuration")

    @property
    def options(self) -> list[str]:
        """Return the options of a command that name this host."""
        named = {"--host": self.address, "--host-command": self.command, "--host-folder": self.folder}
        default = {"--host-command": Host.command, "--host-folder": Host.folder}
        return [f"{option}={value}" for option, value in named.items() if value != default.get(option)]

    def output(self, arguments: Sequence[str]) -> str:
        """Run `oelm ARGUMENTS` on the host and return what it prints."""
        return "".join(self.lines(arguments))

    def lines(self, arguments: Sequence[str]) -> Iterator[str]:
        """Run `oelm ARGUMENTS` on the host and yield what it prints, line by line, as it comes."""
        with self.stream(f"exec {_path(self.command)} {shlex.join(arguments)}") as stream:
            for line in stream:
                yield line.decode(errors="replace")

    def send(self, file: Path, folder: str, beside: Sequence[Path] = ()) -> str:
        """Copy a file to the host, below a folder, with the files beside it that it names.

        Return its path there, which depends on the content of all of them.
        """
        contents = {path.name: path.read_bytes() for path in (file, *beside)}
        place = PurePosixPath(folder) / hashlib.sha256(b"".join(contents.values())).hexdigest()[:16]
        for name, content in contents.items():
            self._write(place, name, content)
        return str(place / file.name)

    def _write(self, place: PurePosixPath, file: str, content: bytes) -> None:
        name, temporary = shlex.quote(file), shlex.quote(f".{file}.tmp")
        script = f"mkdir -p -- {_path(str(place))} && cd -- {_path(str(place))} && cat > {temporary}"
        script = f"{script} && mv -- {temporary} {name}"
        with tempfile.TemporaryFile() as source:
            source.write(content)
            source.seek(0)
            with self.stream(script, source):
                pass

    @contextmanager
    def stream(
        self, script: str, source: IO[bytes] | int = subprocess.DEVNULL, succeeded: tuple[int, ...] = (0,)
    ) -> Iterator[IO[bytes]]:
        """Run a script in the host's folder and yield its output; raise if it ends with another code than these.

        What it gets as input is `source`. A block that ends before the output does ends the connection.
        """
        folder = f"cd -- {_path(self.folder)} || exit {_EXIT_NO_FOLDER}; " if self.folder else ""
        # The login shell of the user may be any, but takes these quotes.
        command = f"sh -c {shlex.quote(f'{folder}echo {shlex.quote(_START)}; {script}')}"
        with tempfile.TemporaryFile() as errors:
            try:
                process = subprocess.Popen(
                    ["ssh", *_OPTIONS, "--", self.address, command], stdin=source, stdout=subprocess.PIPE, stderr=errors
                )
            except OSError:
                raise LabError(f"--host {self.address}: this machine has no ssh") from None
            assert process.stdout is not None
            with process, process.stdout as output:
                try:
                    for line in output:
                        if line.rstrip().decode(errors="replace") == _START:
                            break
                    yield output
                    output.read()
                except Exception:
                    if not _ended_badly(process, succeeded):  # otherwise that is why the output cannot be used
                        raise
                except BaseException:
                    process.terminate()
                    raise
            errors.seek(0)
            if process.returncode not in succeeded:
                raise self._error(process.returncode, errors.read().decode(errors="replace"))

    def _error(self, code: int, text: str) -> LabError:
        """Return the error of a command that ended with a code and printed a text to standard error."""
        said = [line.strip() for line in text.splitlines() if any(map(str.isalnum, line))]
        last = said[-1] if said else f"exit code {code}"
        if code == _EXIT_UNREACHABLE:
            return UnreachableError(f"{self.address}: no connection by ssh ({last})")
        if code == _EXIT_NO_FOLDER:
            return LabError(f"{self.address}: there is no folder {self.folder} there; choose one with --host-folder")
        if code in _EXIT_NO_COMMAND:
            advice = "; give the path of its oelm with --host-command" if self.command.lstrip("~") in last else ""
            return LabError(f"{self.address}: a command cannot be run there ({last}){advice}")
        refusals = [number for number, line in enumerate(said) if line.startswith("oelm: ")]
        reason = "\n".join(said[refusals[0] :]).removeprefix("oelm: ") if refusals else last
        return LabError(f"{self.address}: {reason}")


def _ended_badly(process: subprocess.Popen[bytes], succeeded: tuple[int, ...]) -> bool:
    """Return True when a process has ended with another code than these; end it where it goes on."""
    try:
        return process.wait(_PATIENCE) not in succeeded
    except subprocess.TimeoutExpired:
        process.terminate()
        return False


def _path(path: str) -> str:
    """Return a path of the host for a script there; a leading ~ stands for the home folder there."""
    if path == "~" or path.startswith("~/"):
        return f'"$HOME"{shlex.quote(path[1:])}' if path != "~" else '"$HOME"'
    return shlex.quote(path)
