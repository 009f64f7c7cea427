"""The flight recorder: the last ops of a process in a file that outlives it, and a strict reader."""

from holdfast.ft.telemetry.flight.layout import (
    BadRecording,
    CommunicatorRecord,
    OpRecord,
    OpStatus,
    OpWait,
    Recording,
    RecordingState,
    Signature,
)
from holdfast.ft.telemetry.flight.reader import find, read, read_all
from holdfast.ft.telemetry.flight.recorder import FlightRecorder, open_recorder

__all__ = [
    "BadRecording",
    "CommunicatorRecord",
    "FlightRecorder",
    "OpRecord",
    "OpStatus",
    "OpWait",
    "Recording",
    "RecordingState",
    "Signature",
    "find",
    "open_recorder",
    "read",
    "read_all",
]
