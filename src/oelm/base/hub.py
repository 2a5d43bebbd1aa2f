"""Find out in seconds, and not in half a minute of retries, that the Hugging Face Hub does not answer."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

# Seconds that the Hub has to answer in.
_PATIENCE = 4.0
# The modules in which libraries keep whether HF_HUB_OFFLINE is set.
_SWITCHES = ("huggingface_hub.constants", "datasets.config")


def hub_options(name: str | PathLike[str]) -> dict[str, Any]:
    """Return the options of `from_pretrained` for a folder or Hub name: only the cache, where the Hub does not answer.

    A folder needs no Hub, and where HF_HUB_OFFLINE is set the library does not ask for it.
    """
    return {} if Path(name).exists() or not hub_is_absent() else {"local_files_only": True}


@contextmanager
def cache_without_hub() -> Iterator[None]:
    """Let the Hub's libraries read nothing but their cache in this context, where the Hub does not answer.

    This is for `datasets`, which has no option for it; it must have been imported before.
    """
    if not hub_is_absent():
        yield
        return
    libraries: list[Any] = [sys.modules[name] for name in _SWITCHES if name in sys.modules]
    for library in libraries:
        library.HF_HUB_OFFLINE = True
    try:
        yield
    finally:
        for library in libraries:
            library.HF_HUB_OFFLINE = False


def hub_is_absent() -> bool:
    """Return True when the Hub would be asked and does not answer: not where HF_HUB_OFFLINE is set."""
    from huggingface_hub import constants

    return not constants.is_offline_mode() and not hub_answers(constants.ENDPOINT)


@cache
def hub_answers(endpoint: str) -> bool:
    """Return whether a server answers there within seconds, whatever it says; it is asked once in a process."""
    answered = threading.Event()

    def ask() -> None:
        from huggingface_hub import get_session

        try:
            get_session().head(endpoint, timeout=_PATIENCE)
        except Exception:  # noqa: BLE001 - the layers of the network stack raise many kinds of errors
            return
        answered.set()

    # In a thread of its own: looking up a name can take longer than any limit of a request.
    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_PATIENCE)
    return answered.is_set()
