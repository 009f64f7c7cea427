"""What a process asks of its operating system: forks, files, keys, environment, and what it ran out of."""
