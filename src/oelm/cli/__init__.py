"""The command line: parse the arguments, call the library, print the results."""

from .app import app, main

__all__ = ["app", "main"]
