"""Tool use over the Model Context Protocol."""
