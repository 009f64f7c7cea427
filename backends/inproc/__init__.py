"""The `inproc` backend: ranks as threads of one process."""
