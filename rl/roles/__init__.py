"""The processes and services of a run: trainers, generators, holders, the driver's service and buffer."""
