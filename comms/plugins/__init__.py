"""The plugin API: what a package offers under the entry-point group `holdfast`, and the plugins that are installed."""

from holdfast.comms.plugins.spec import (
    API_VERSION,
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
    "Available",
    "BackendInfo",
    "Capabilities",
    "DetectorInfo",
    "OpEvent",
    "Unavailable",
    "hookimpl",
    "hookspec",
]
