"""Tensors as memory: what users pass, and what transports take."""
