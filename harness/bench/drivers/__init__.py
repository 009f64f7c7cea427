"""One library each, driven for `holdfast bench`."""
