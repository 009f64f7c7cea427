"""The control channel: small authenticated messages between the processes of a job."""
