"""One-sided access between the ranks of a communicator: mapped memory, or requests and replies."""
