"""The settings of a generator."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from holdfast.comms.quantities import integer_in
from holdfast.store.casts.wire_cast import CastName

Mode = Literal["fixed", "continuous"]
WeightUpdate = Literal["swap", "drain"]


class GeneratorSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How a generator runs.

    In mode "fixed" each request is one static batch; its completions are a function of the request and the weights.
    In mode "continuous" up to `slots` samples of any requests share a running batch, and newer weights are swapped in
    between two tokens ("swap"), or once the running samples are drawn ("drain"). A sample has at most `length` tokens
    with its prompt (0: as many as the model can). `cast` is what weights are rounded to on their way here (None: every
    bit arrives). `timeout` is the limit of each call, in seconds.
    """

    mode: Mode = "fixed"
    weight_update: WeightUpdate = "swap"
    slots: int = 32
    length: int = 0
    threads: int = 1
    cast: CastName | None = None
    timeout: float = 60.0

    def __post_init__(self) -> None:
        for name, known in (("mode", get_args(Mode)), ("weight_update", get_args(WeightUpdate))):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: give one of {', '.join(known)}")
        for name, least in (("slots", 1), ("length", 0), ("threads", 1)):
            integer_in(getattr(self, name), name, least)
        if not self.timeout > 0:
            raise ValueError(f"timeout={self.timeout} must be more than 0 seconds")
