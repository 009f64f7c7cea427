"""The forms in which torch calls a process group: overloads, lists of tensors, options."""
