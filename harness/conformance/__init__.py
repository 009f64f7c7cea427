"""What it takes to be a backend: the checks that every one must pass, ours and yours.

`collectives` and `failures` hold one body a check, as pytest functions that ask for a backend; `run` runs them on one
by name, from an installed wheel (`pip install 'holdfast[conformance]'`, then `holdfast conformance --backend NAME`).
"""
