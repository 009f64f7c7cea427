"""Measures the services of the RL workload while their replicas are killed."""
