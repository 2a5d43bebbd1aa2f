"""Use a trained run: load its model, evaluate it again, generate text, predict."""
