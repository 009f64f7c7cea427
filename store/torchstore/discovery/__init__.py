"""How processes find a torchstore store without being told of it."""
