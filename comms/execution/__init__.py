"""Checks ops and runs them in order."""
