"""Text corpora: from text files to token files and batches."""
