"""`holdfast bench layer`, `overhead` and `imports`: what holdfast adds."""
