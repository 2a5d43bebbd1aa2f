"""Write the notebooks from the scripts that are marked with cells: `python examples/notebooks.py`.

A line `# %%` begins a cell of code, `# %% [markdown]` one of text, as editors know it. The script is the source.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
SCRIPTS = ("huggingface_trainer.py", "own_text.py")
_CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


def notebook(script: str) -> dict[str, Any]:
    """Return the notebook of a script, without outputs."""
    _, *parts = _CELL.split(script)
    cells = []
    for number, (marked, text) in enumerate(zip(parts[::2], parts[1::2], strict=True)):
        kind = "markdown" if marked else "code"
        source = re.sub(r"^# ?", "", text.strip(), flags=re.MULTILINE) if marked else text.strip()
        cell = {"cell_type": kind, "id": f"cell-{number}", "metadata": {}, "source": source.splitlines(keepends=True)}
        cells.append(cell if marked else {**cell, "execution_count": None, "outputs": []})
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    return {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}


def main() -> None:
    """Write a notebook beside each script."""
    for name in SCRIPTS:
        text = json.dumps(notebook((FOLDER / name).read_text(encoding="utf-8")), indent=1, ensure_ascii=False)
        (FOLDER / name).with_suffix(".ipynb").write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
