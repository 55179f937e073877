"""Checkpoints: what training needs to go on bit for bit, as one directory that appears whole or not at all."""
