"""Sums whose bits do not depend on the order of addition."""
