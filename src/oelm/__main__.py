"""`python -m oelm` is the `oelm` command."""

from .cli.app import main

main()
