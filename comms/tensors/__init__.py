"""Tensors as memory: checks, packing and overlap of the tensors that users pass."""
