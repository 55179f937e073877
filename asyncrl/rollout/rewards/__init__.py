"""Reward functions, sync or async, by name or dotted path.

A function scores one sample, `reward(sample, prompt, **args) -> float`, or with `reward.scope = group` all samples of a
prompt, `reward(samples, prompt, **args) -> list[float | None]`. A dict of named numbers may stand in place of a float.
"""
