"""`holdfast demo`: the reference workload on this machine, broken on purpose, and what became of it."""
