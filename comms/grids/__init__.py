"""Grids of ranks, with communicators along their dimensions."""
