"""Starts services of actors: `await Policy.options(num_replicas=2).as_service(model)`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from holdfast.rl.services.options import ServiceOptions
from holdfast.rl.services.service import Service


@dataclass(frozen=True, slots=True)
class ServiceSpec:
    """An actor and the options of its service, to be started."""

    actor: type[Any]
    chosen: ServiceOptions

    def options(self, **changes: Any) -> ServiceSpec:
        """The same with other options."""
        return ServiceSpec(self.actor, replace(self.chosen, **changes))

    async def as_service(self, *args: Any, **kwargs: Any) -> Service:
        """Start the service; each replica makes `actor(*args, **kwargs)`. Raises `ServiceFailed`."""
        return await Service.start(self.actor, self.chosen, args, kwargs)


class Servable:
    """Base of actors: `await Policy.options(num_replicas=2).as_service(model)`."""

    @classmethod
    def options(cls, **chosen: Any) -> ServiceSpec:
        """The options of a service of this actor; see `ServiceOptions`."""
        return ServiceSpec(cls, ServiceOptions(**chosen))


def served(actor: type[Any], **chosen: Any) -> ServiceSpec:
    """The options of a service of any actor's class, which need not be `Servable`."""
    return ServiceSpec(actor, ServiceOptions(**chosen))
