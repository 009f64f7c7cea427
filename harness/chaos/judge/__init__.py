"""The result of a run: checks, figures, the verdict, pages."""
