"""The algorithm as the field writes it: episodes, two loops, and the losses of group-relative policy optimisation."""
