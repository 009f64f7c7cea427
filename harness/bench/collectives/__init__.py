"""`holdfast bench OP`: libraries in turn, every result checked."""
