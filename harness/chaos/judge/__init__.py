"""What came of a run: checks, figures, the verdict."""
