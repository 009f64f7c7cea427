"""Parses torch's calls of a process group: overloads, lists of tensors, options; runs hooks around them."""
