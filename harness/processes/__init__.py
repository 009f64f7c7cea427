"""Forks processes from a zygote that has torch imported, and talks to them."""
