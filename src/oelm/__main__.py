"""`python -m oelm` is the `oelm` command."""

from .cli import main

main()
