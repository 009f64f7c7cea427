"""The history of every figure that matters, measured by asv: one file a domain. `make asv-run`, `make asv-publish`.

asv finds the earlier results of a benchmark by its module, class and function: renaming one of these loses its history.
"""
