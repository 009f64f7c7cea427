"""Runs of the simulator: one seed, many seeds, and the smallest schedule that fails."""
