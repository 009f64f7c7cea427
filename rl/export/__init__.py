"""Saved versions of a run: found on disk, evaluated, and exported for transformers, as safetensors, for ExecuTorch."""
