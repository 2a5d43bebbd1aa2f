"""The command that looks inside a model: look."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from . import completion
from .options import JsonOption
from .report import Language
from .terminal import echo, errors, progress_bar, quiet_libraries

if TYPE_CHECKING:
    from ..runs.looks import ModelLook


def look(
    source: Annotated[
        Path,
        typer.Argument(
            help="A run's folder, or one of a model: exported, saved after oelm.apply, or any other.",
            autocompletion=completion.runs,
        ),
    ],
    second: Annotated[
        Path | None, typer.Argument(help="Another one, to compare it with.", autocompletion=completion.runs)
    ] = None,
    text: Annotated[list[str] | None, typer.Option(help="The text to read; give it again for more texts.")] = None,
    text_file: Annotated[list[Path] | None, typer.Option(help="A file with a text; may be given again.")] = None,
    target: Annotated[
        list[str] | None, typer.Option(help="For an encoder-decoder: what its decoder reads, for each text or for all.")
    ] = None,
    context: Annotated[
        list[int] | None, typer.Option(min=2, help="Read only so many tokens; give it again for several lengths.")
    ] = None,
    layer: Annotated[list[int] | None, typer.Option(min=0, help="Only this layer; may be given again.")] = None,
    last: Annotated[bool, typer.Option("--last", help="Use the last checkpoint, not the best model.")] = False,
    drift: Annotated[
        bool, typer.Option("--drift", help="Also compare the last checkpoint's maps with those of the run's others.")
    ] = False,
    out: Annotated[Path, typer.Option("--out", "-o", help="The folder to write to.")] = Path("look"),
    lang: Language = "en",
    as_json: JsonOption = False,
) -> None:
    """Look inside a model: the attention map of every head on a text, and what each head looks at.

    Writes a page, a picture and JSON: shares on other tokens, induction, entropy, the rank of each head's W_qᵀ W_k.

    With two folders: side by side, and how they differ.
    """
    with errors():
        from ..base.files import require_reachable
        from ..lab.status import refuse_folder_of_runs
        from ..report.words import words

        say = words(lang)
        sources = [source] if second is None else [source, second]
        for folder in sources:
            require_reachable(folder)
            refuse_folder_of_runs(folder)
        texts = [*(text or []), *map(_read, text_file or [])]
        from ..evaluation.look import look_at
        from ..evaluation.look_sources import Texts
        from ..report.look import write_look

        quiet_libraries()
        given = Texts(tuple(texts), tuple(target or ()), tuple(context or ()))
        with progress_bar() as show:
            found = look_at(sources, given, layers=layer or (), last=last, drift=drift, show=show)
        files, problems = write_look(found.look, found.maps, out, lang)
        if as_json:
            echo((out / "look.json").read_text(encoding="utf-8").rstrip())
        else:
            for model in found.look.models:
                echo(_table(model, lang))
        for problem in problems:
            echo(f"oelm: {problem}", fg="yellow", err=True)
        for file in files:
            echo(say("wrote", path=file), err=as_json)


def _read(file: Path) -> str:
    from ..data.text_files import Meter, open_text

    with open_text(file, Meter(), None) as stream:
        return stream.read()


def _table(model: ModelLook, lang: str) -> str:
    """Return a table of the heads with the highest value of each figure."""
    from ..base.text import plain_table, plain_text
    from ..report.look import has_several_kinds, head_label, strongest_heads
    from ..report.words import words

    say = words(lang)
    table = plain_table()
    for name in ("look_figure", "look_head"):
        table.add_column(say(name))
    table.add_column(say("look_value"), justify="right")
    for name, head, value in strongest_heads(model):
        table.add_row(say(f"look_measure_{name}"), head_label(head, has_several_kinds(model), say), f"{value:.2f}")
    return plain_text(table, f"{model.source}: {say('look_strongest')}")
