"""The process side of a torchstore store: its directory of keys, and the memory that holds what was put."""
