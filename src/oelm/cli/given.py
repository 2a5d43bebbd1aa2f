"""The options and arguments that a command was given, as the command line of another process."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import typer


def given_words(
    context: typer.Context, without: Collection[str] = (), replaced: Mapping[str, str] | None = None
) -> list[str]:
    """Return the words that repeat a command without some of its parameters; defaults are not written out.

    Arguments that are keys of `replaced` are replaced. They stand last, so that none can be taken for an option.
    """
    options: list[str] = []
    arguments: list[str] = []
    for parameter in context.command.params:
        name = str(parameter.name)
        source = context.get_parameter_source(name)
        if name in without or source is None or source.name != "COMMANDLINE":
            continue
        value = context.params[name]
        values = value if isinstance(value, list | tuple) else [value]
        if parameter.param_type_name == "argument":
            arguments += [(replaced or {}).get(str(entry), str(entry)) for entry in values]
        elif isinstance(value, bool):
            options += [parameter.opts[0]] if value else []
        else:
            # In one word, so that a value that begins with a dash stays a value.
            options += [f"{max(parameter.opts, key=len)}={entry}" for entry in values]
    command = str(context.info_name)
    return [command, *options, *(["--", *arguments] if arguments else [])]
