"""What every room needs: files, locks, strict models, the machine. Knows nothing but the errors."""
