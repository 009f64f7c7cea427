"""The state of a job and the ranks to blame for its stops, from its register, recordings and event logs."""
