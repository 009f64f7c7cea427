"""Actors in processes of their own, over forks of the zygote or over Monarch, and services of their replicas."""
