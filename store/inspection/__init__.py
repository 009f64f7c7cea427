"""Looks into a store from outside: what it has, and whether all replicas are right."""
