"""Forks processes from a zygote that has torch imported, and exchanges messages with them."""
