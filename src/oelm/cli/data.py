"""The commands below `oelm data`: prepare."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from .flags import Command, CommandGroup
from .terminal import echo, errors, folded, quiet_libraries

data_app = typer.Typer(cls=CommandGroup, help="Prepare text for training.", no_args_is_help=True)


@data_app.callback()
def _data() -> None:
    pass


@data_app.command(
    "prepare",
    cls=Command,
    epilog="Examples:\n\noelm data prepare text/ --train-bpe 8192 --out data/mine\n\n"
    "oelm data prepare tinystories --tokenizer gpt2 --out data/tinystories",
)
def prepare_data(
    source: Annotated[str, typer.Argument(help="A file, folder or Hub dataset, such as tinystories or openwebtext.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")],
    tokenizer: Annotated[str | None, typer.Option(help="A Hugging Face tokenizer's name or folder.")] = None,
    train_bpe: Annotated[int | None, typer.Option(min=257, help="Train a BPE of this size instead.")] = None,
    val: Annotated[str | None, typer.Option(help="A separate validation file.")] = None,
    test: Annotated[str | None, typer.Option(help="A test file: runs are measured on it once, at their end.")] = None,
    val_fraction: Annotated[float, typer.Option(help="Share of the documents to hold out without --val.")] = 0.01,
    text_field: Annotated[str | None, typer.Option(help="The column or key of the text, if not detected.")] = None,
    description: Annotated[str | None, typer.Option(help="What this text is; stored in all records from it.")] = None,
) -> None:
    """Turn text into token files, from text, JSONL, CSV or Parquet (also compressed) or a Hub dataset."""
    with errors():
        from ..data.corpus.header import HEADER
        from ..data.corpus.prepare import prepare

        quiet_libraries()
        # `prepare` accepts an existing dataset only if it is the requested one; otherwise it raises.
        already_there = (out / HEADER).is_file()
        data = prepare(
            source,
            out,
            tokenizer=tokenizer,
            train_bpe=train_bpe,
            val=val,
            test=test,
            val_fraction=val_fraction,
            text_field=text_field,
            description=description,
            progress=True,
        )
        held_out = {"validation": data.val, "test": data.test}
        parts = [f"{len(split):,} for {name}" for name, split in held_out.items() if split is not None]
        validation = "".join(f", {part}" for part in parts[:-1]) + (f" and {parts[-1]}" if parts else "")
        smaller = train_bpe is not None and data.vocab_size < train_bpe
        reason = f" (not {train_bpe:,}: the text has no more pairs to merge)" if smaller else ""
        counts = f"{len(data.train):,} tokens for training{validation}, vocabulary {data.vocab_size:,}{reason}"
        done = f"{out}: already holds this data, complete:" if already_there else f"wrote {out}:"
        echo("\n".join(folded(f"{done} {counts}")))
        if data.overlap:
            echo(f"warning: {data.overlap}", err=True)
        if data.val:
            echo(f"next: oelm train --data {shlex.quote(str(out))} --model gpt:tiny method=identity-key")
