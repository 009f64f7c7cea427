"""Runs of the simulator with many ranks."""
