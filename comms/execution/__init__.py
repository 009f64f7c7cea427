"""How ops are checked and run."""
