"""`holdfast gate BASE HEAD`: tells a change that is slower from noise, with known error rates."""
