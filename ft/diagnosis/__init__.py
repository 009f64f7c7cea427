"""What happened to a job: evidence from its recordings, and the rank to blame."""
