"""Attention kernels of the project's GPT."""
