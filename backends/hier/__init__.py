"""The `hier-ucx` and `hier-gloo` backends: shared memory within a host, another transport between hosts."""
