"""A whole job in virtual time: the classes that run in production, under a network and faults that are data.

One thread, no clock, socket or chance but the seed: the same schedule gives the same trace, bit for bit. Simulated
times say how the protocol behaves, not how fast a machine is.
"""
