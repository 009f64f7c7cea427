"""Publishing one part of a version."""
