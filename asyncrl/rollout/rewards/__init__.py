"""Reward functions: `reward(sample, prompt, **args) -> float`, sync or async, by name or dotted path."""
