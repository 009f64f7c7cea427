"""The services of a run: trainers, generators, the buffer."""
