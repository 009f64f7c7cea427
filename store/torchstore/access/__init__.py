"""The client side of a torchstore store: turns calls into contents and copies."""
