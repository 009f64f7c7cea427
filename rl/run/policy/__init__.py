"""Checks and warms up the policy of a run before its first step, in a process of its own."""
