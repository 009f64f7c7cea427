"""`holdfast demo`: runs the reference workload on this machine, injects faults, and reports the result."""
