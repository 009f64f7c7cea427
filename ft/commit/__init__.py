"""The protocol by which all ranks commit a step, or none."""
