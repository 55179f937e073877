"""The demo: a tiny model, a task of its own, and a reward; and SmolLM2 for a first run with a real model."""
