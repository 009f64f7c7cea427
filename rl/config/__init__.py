"""The typed configuration of a run, read from TOML."""
