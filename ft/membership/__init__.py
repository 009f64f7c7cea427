"""The membership core: pure functions and a state machine without I/O."""
