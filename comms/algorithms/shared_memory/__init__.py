"""Collectives and point to point for ranks that map the same memory."""
