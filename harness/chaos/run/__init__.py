"""One run of a scenario: its processes, faults and moments."""
