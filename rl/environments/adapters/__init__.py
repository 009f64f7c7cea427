"""Environments of other libraries, by name."""
