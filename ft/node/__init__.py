"""The thread of a process that takes part in its job's membership."""
