"""asyncrl: reinforcement-learning post-training of language models as one asyncio program."""
