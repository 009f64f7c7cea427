"""The simulated world: processes, network, register, and the faults that break them."""
