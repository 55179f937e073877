"""Experiment trackers: TensorBoard, Weights & Biases, trackio, and trackers of the user's own.

A tracker is a *sink*. Each sink runs in a process of its own, which follows metrics.jsonl. So the job hands nothing
over, waits for nobody, and loses nothing: a sink that is slow catches up.
"""
