"""`holdfast blame`: finds the rank that stopped, slowed down or broke a job, from its flight recordings."""
