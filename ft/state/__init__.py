"""State that outlives the ranks that held it: copies on neighbours, checkpoints, and how newcomers get it."""
