"""What commands and launched processes print: text as it is, on any terminal."""
