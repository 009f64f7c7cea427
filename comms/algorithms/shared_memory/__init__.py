"""Collectives and point-to-point messages for ranks that map the same memory."""
