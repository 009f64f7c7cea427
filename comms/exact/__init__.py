"""Exact sums, independent of the order of addition."""
