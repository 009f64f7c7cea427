"""What a process finds around it: the variables of its job, its scheduler, and the addresses of its host."""
