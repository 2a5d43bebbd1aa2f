"""Helpers that every folder may import: files, locks, strict models, plain tables, cores. Imports only `errors`."""
