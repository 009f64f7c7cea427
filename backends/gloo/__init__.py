"""The `gloo` backend: torch's own ProcessGroupGloo."""
