"""Environments that need nothing but holdfast."""
