"""How often blame is right: cases with a known culprit, generated and on real processes."""
