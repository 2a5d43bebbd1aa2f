"""What every folder may use: files, locks, strict models, plain tables, the machine. Imports only `errors`."""
