"""Failure detectors, as plugins: `detector` is the seam, `watch` runs them."""
