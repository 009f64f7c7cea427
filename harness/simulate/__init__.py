"""Simulates a whole job in virtual time: the production classes, with a network and faults that are data.

One thread, no clock and no socket; all random choices come from the seed. Equal schedules give equal traces, bit for
bit. Simulated times show how the protocol behaves, not how fast a machine is.
"""
