"""Runs the Python file that a user names as a plugin: code of their own, which registers a family or a model class.

Only the user names it, on the command line or in an environment variable, which the processes that a command starts
inherit. A config or a run's folder cannot: those come from others, too, and loading them must run no code.
"""

from __future__ import annotations

import hashlib
import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from ..errors import FileError, OelmError

VARIABLE = "OELM_PLUGIN"
# The plugin's code is a module of this name, so that its classes can be found again by name.
_MODULE = "oelm_plugin"
_loaded: list[Plugin] = []


@dataclass(frozen=True)
class Plugin:
    """The file that was run, and the hash of its content."""

    path: Path
    sha256: str

    def __str__(self) -> str:
        return f"{self.path.name} ({self.sha256[:12]})"


def load_plugin(path: str | os.PathLike[str]) -> Plugin:
    """Run a Python file, once, and hand its path on to the processes that this one starts."""
    file = Path(path).resolve()
    if file.suffix != ".py":
        raise FileError(f"plugin {path}: a plugin is a Python file, whose name ends in .py")
    try:
        content = file.read_bytes()
        code = compile(content, str(file), "exec")
    except OSError as error:
        raise FileError(f"plugin {path}: cannot be read ({error.strerror})") from None
    except SyntaxError as error:
        raise FileError(f"plugin {path}: line {error.lineno} is not Python ({error.msg})") from None
    plugin = Plugin(file, hashlib.sha256(content).hexdigest())
    loaded = loaded_plugin()
    if loaded == plugin:
        return plugin
    if loaded is not None:
        raise FileError(f"plugin {path}: {loaded} is loaded already; one file can import the other")
    module = sys.modules[_MODULE] = ModuleType(_MODULE)
    module.__file__ = str(file)
    try:
        exec(code, module.__dict__)
    except OelmError:
        raise
    # The user's own code may raise anything: its frames are shown, and none of what called it.
    except Exception as error:  # noqa: BLE001
        own = error.__traceback__.tb_next if error.__traceback__ else None
        shown = "".join(traceback.format_exception(type(error), error, own)).rstrip()
        raise FileError(f"plugin {path}: it ended in an error\n{shown}") from None
    os.environ[VARIABLE] = str(file)
    _loaded.append(plugin)
    return plugin


def loaded_plugin() -> Plugin | None:
    """Return the plugin that this process has run, or None."""
    return _loaded[0] if _loaded else None
