"""A host of a job on several hosts: its name in the register, and its view of the job."""
