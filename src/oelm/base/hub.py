"""Find out in seconds, and not in half a minute of retries, that the Hugging Face Hub does not answer."""

from __future__ import annotations

import threading
from functools import cache
from os import PathLike
from pathlib import Path
from typing import Any

# Seconds that the Hub has to answer in.
_PATIENCE = 4.0


def hub_options(name: str | PathLike[str]) -> dict[str, Any]:
    """Return the options of `from_pretrained` for a folder or Hub name: only the cache, where the Hub does not answer.

    A folder needs no Hub, and where HF_HUB_OFFLINE is set the library does not ask for it.
    """
    from huggingface_hub import constants

    if Path(name).exists() or constants.is_offline_mode() or hub_answers(constants.ENDPOINT):
        return {}
    return {"local_files_only": True}


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
