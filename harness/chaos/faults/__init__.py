"""The fault types that come with holdfast, one idea a file."""
