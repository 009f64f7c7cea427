"""Registers: small linearizable cells, the one place where processes agree.

A register URL names a job's registers (`sqlite:///path/job.sqlite`, `memory://name`); each cell in it has a name of
its own: `view` holds the job's membership, `store` the weight store's catalogue.
"""
