"""The history of every figure that matters, measured by asv: one file a domain. `make asv-run`, `make asv-publish`."""
