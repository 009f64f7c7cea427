"""The conformance suite of backends: the checks that each one must pass, ours or a plugin's.

The checks are pytest functions with a fixture for the backend; `run` runs them on a backend by its name, from an
installed wheel (`pip install 'holdfast[conformance]'`, then `holdfast conformance --backend NAME`).
"""
