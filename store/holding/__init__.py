"""The replicas that a process keeps, and their upkeep."""
