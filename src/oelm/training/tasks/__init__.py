"""Training objectives: language modelling, classification, text to text."""
