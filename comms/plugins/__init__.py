"""The plugin API: hooks for packages under the entry-point group `holdfast`, and the registry of installed plugins."""

from holdfast.comms.plugins.hints import Hint
from holdfast.comms.plugins.spec import (
    API_VERSION,
    AbortEvent,
    Available,
    BackendInfo,
    Capabilities,
    DetectorInfo,
    OpEvent,
    Unavailable,
    hookimpl,
    hookspec,
)

__all__ = [
    "API_VERSION",
    "AbortEvent",
    "Available",
    "BackendInfo",
    "Capabilities",
    "DetectorInfo",
    "Hint",
    "OpEvent",
    "Unavailable",
    "hookimpl",
    "hookspec",
]
