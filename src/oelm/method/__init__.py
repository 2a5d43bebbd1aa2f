"""What a method is, and what it does to a model: plan, set, freeze, seal, verify."""
