"""Services: replicas of an actor that are called as one, replaced when they die, and scaled while they run."""
