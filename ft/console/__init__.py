"""Output of commands and of launched processes: unchanged text, on any terminal."""
