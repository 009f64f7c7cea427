"""Collectives for transports that pass messages."""
