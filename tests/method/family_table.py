"""Run the checks of every family and print a table: `python -m tests.method.family_table [FAMILY ...]`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from oelm.models.small import SMALL
from tests import conftest  # noqa: F401  (threads and verbosity)
from tests.support.models import CHECKS


def outcome(name: str, check: str) -> str:
    """Return 'yes' if a check passes for a family, or else its error."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            CHECKS[check](name, Path(folder))
        except Exception as error:  # noqa: BLE001  (a table of outcomes: the failure is what it shows)
            return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".strip(": ")
    return "yes"


def main(names: list[str]) -> int:
    """Print a Markdown table, one line per family. Return 1 if any check failed, else 0."""
    failed = False
    print("| family |", " | ".join(CHECKS), "|")
    print("|---|" + "---|" * len(CHECKS))
    for name in names:
        outcomes = [outcome(name, check) for check in CHECKS]
        failed |= any(result != "yes" for result in outcomes)
        print(f"| {name} |", " | ".join(outcomes), "|", flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or list(SMALL)))
