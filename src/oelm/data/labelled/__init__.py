"""Labelled tasks for fine-tuning: tables to texts and classes."""
