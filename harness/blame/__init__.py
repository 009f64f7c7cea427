"""`holdfast blame`: who is to blame for a job that stopped, slowed down or broke, from its flight recordings."""
