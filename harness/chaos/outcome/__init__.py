"""The result of a run: checks, figures, what differs from what was expected, pages."""
