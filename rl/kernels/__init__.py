"""Kernels of a trainer: log-probabilities of tokens, by torch's ops and in Triton."""
