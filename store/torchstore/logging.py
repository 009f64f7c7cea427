"""The name of torchstore's module `logging`."""

from __future__ import annotations

import logging
import os
import sys


def init_logging() -> None:
    """Log to standard output, from level TORCHSTORE_LOG_LEVEL (INFO) on."""
    level = os.environ.get("TORCHSTORE_LOG_LEVEL", "INFO").upper()
    root = logging.getLogger()
    root.setLevel(level)
    if not any(getattr(each, "stream", None) is sys.stdout for each in root.handlers):
        handler = logging.StreamHandler(sys.stdout)
        handler.setLevel(level)
        root.addHandler(handler)
