"""What a training loop stands on: its stages, the job that they share, and the rules between engines and trainer."""
