"""What is learnt: the task, the model, the loss."""
