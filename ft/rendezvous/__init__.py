"""The key-value table through which the members of an epoch build its communicator."""
