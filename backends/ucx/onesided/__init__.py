"""One-sided access over UCX: windows, regions, and the workers that reach them."""
