"""Samples as text: kept in samples.jsonl of the run directory while the job runs, and listed from there."""
