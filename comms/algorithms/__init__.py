"""Collectives for transports that have none of their own, written once over a small primitive.

`direct` is for transports where a rank can read its peers' memory (shm, inproc); it stands on a `board` of flags and
slots in memory that all ranks map, and on `arithmetic` for the reductions.

`messages` is for transports that only pass messages (ucx); it chooses between `ring`, `doubling`, `tree`, `bruck` and
`pairwise` by the model in `cost`.
"""
