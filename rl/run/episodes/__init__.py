"""What the episodes of a run come from: prompts and a reward, or an environment and its servers."""
