"""Reports of runs: one self-contained HTML file that works offline, in light and dark, on a laptop and a phone."""
