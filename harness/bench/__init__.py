"""`holdfast bench`: our backends measured beside other libraries, in one run, with every result checked."""
