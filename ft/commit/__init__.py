"""How ranks agree that a step is done."""
