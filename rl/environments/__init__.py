"""Environments for reinforcement learning: reset, step, state; in this process or over OpenEnv's protocol."""
