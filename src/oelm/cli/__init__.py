"""The command line: parse, call, print."""

from .app import app, main

__all__ = ["app", "main"]
