"""The reference workload: GRPO on sums of three digits, by processes that may die at any time.

A driver hands out units of generation and keeps their samples; generators pull weights from the store and do units;
trainers are ranks of an `ft.Session` that reduce gradients through `comms` and publish what they learn.
"""
