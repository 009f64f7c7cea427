"""Trainers with TorchTitan's models and parallelisms."""
