"""Collectives for transports that have none of their own, each written once over a few primitives.

`shared_memory` is for transports where a rank can read its peers' memory (shm, inproc): `direct` uses a `board` of
flags and slots in memory that all ranks map, and `arithmetic` for the reductions.

`message_passing` is for transports that only pass messages (ucx): `messages` chooses between `ring`, `doubling`,
`tree`, `bruck` and `pairwise` by the model in `cost`.
"""
