"""Shows a run of reinforcement learning: its report, and its episodes as a page."""
