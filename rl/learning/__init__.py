"""The task, the model and the loss."""
