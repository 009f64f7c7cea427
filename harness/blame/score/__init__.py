"""Scores blame on cases with a known culprit, generated and on real processes."""
