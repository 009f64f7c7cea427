"""Versions on disk: directories of safetensors, and of torch.distributed.checkpoint."""
