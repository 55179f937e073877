"""Half a job: the trainer on saved batches, or the engines alone, with stand-ins for the half that is missing."""
