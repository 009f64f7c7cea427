"""What a process reports about itself: events, metrics, flight recordings."""
