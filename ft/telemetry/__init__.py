"""What a process reports of itself: events, metrics, flight recordings."""
