"""The `nccl` and `rccl` backends: torch's own ProcessGroupNCCL."""
