"""Reinforcement learning that outlives each of its parts, on services over Monarch or processes of this host.

`grpo` has the loops as the field writes them; `run` assembles their parts; `holdfast rl train` starts a run.
"""
