"""Casts of floating-point tensors on their way to a reader that asks for them."""
