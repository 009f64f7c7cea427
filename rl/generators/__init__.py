"""Generators: draw completions from a causal language model whose weights follow the store."""
