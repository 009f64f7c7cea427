"""The `shm` backend: ranks as processes of one host, over shared memory."""
