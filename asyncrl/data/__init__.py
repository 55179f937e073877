"""Prompts in, training batches out: sources, tokenizer, prompt stream, samples, batches, staleness."""
