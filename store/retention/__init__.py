"""Copies of versions on disk: every K-th one while a job runs, and the newest back when one starts."""

from holdfast.store.retention.disk_retention import DiskRetention
from holdfast.store.retention.restore import restore

__all__ = ["DiskRetention", "restore"]
