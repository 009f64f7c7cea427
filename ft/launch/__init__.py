"""`holdfast run`: starts, guards and reports on the processes of a job on this machine."""
