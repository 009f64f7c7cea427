"""`holdfast top`: a live view of a job, from its register, flight recordings and event logs."""
