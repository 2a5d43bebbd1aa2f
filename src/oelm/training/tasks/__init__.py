"""What a run learns: language modelling, classification, text to text."""
