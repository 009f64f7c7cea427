"""`holdfast bench recovery` and `evictions`."""
