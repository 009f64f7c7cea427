"""`holdfast run`: starts the processes of a job on this machine."""
