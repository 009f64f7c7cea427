"""Prompts, episodes and the buffer between generation and training."""
