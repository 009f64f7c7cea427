"""Operating system helpers: forks, files, keys, environment variables, exhausted resources."""
