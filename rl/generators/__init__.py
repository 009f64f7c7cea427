"""Generators draw completions from a causal language model. Its weights follow the store."""
