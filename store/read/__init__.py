"""Reading versions into tensors."""
