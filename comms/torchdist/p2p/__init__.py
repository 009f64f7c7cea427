"""Point to point of the torch adapter: channels, and the matching of messages to receives."""
