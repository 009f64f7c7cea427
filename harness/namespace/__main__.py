"""`python -m holdfast`: the `holdfast` command of this interpreter.

This folder is the part of the namespace package `holdfast` that lies in no subpackage.
"""

from __future__ import annotations

from holdfast.harness.cli.app import main

if __name__ == "__main__":
    main()
