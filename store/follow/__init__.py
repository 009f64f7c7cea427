"""Readers that follow the store's newest version, and switches that make a fleet of readers serve one version."""
