"""A run of reinforcement learning: its processes, its directory, its events, and how it is resumed."""
