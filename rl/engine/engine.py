"""The seam to what runs actors in processes of their own, and the engine in use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar, Token
from types import TracebackType
from typing import Any, Protocol, Self

from holdfast.rl.engine.errors import NoEngine

OnExit = Callable[[str], None]
"""Called in the event loop with how a process ended, in words; `STOPPED` if `stop` ended it."""

STOPPED = "was stopped"


class ActorProcess(Protocol):
    """A process with an actor in it."""

    @property
    def name(self) -> str: ...

    @property
    def pid(self) -> int: ...

    @property
    def host(self) -> str:
        """The address of its host; empty for this one."""

    @property
    def alive(self) -> bool:
        """False once its end was seen."""

    async def call(self, method: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Call a public method of the actor. Sync methods run one at a time, async ones beside each other.

        Raises `ActorDied` as soon as the process has ended, `EndpointTimeout` after `timeout` seconds,
        `EndpointFailed` if the method raised, `NoSuchEndpoint`.
        """

    async def ping(self, timeout: float) -> None:
        """Return once the process has answered, whatever its methods do. Raises `ActorDied`, `EndpointTimeout`."""

    def kill(self) -> None:
        """Send SIGKILL; no effect if the process is gone."""

    async def stop(self, timeout: float = 10.0) -> None:
        """Call the actor's method `close`, if it has one; after `timeout` seconds kill. Idempotent."""


class Engine(Protocol):
    """Starts actors in processes of their own. Used in one event loop; a context manager that ends them all."""

    async def start(
        self,
        name: str,
        actor: type[Any],
        /,
        *args: Any,
        on_exit: OnExit | None = None,
        environ: Mapping[str, str] | None = None,
        python: str | None = None,
        host: str | None = None,
        **kwargs: Any,
    ) -> ActorProcess:
        """Make `actor(*args, **kwargs)` in a process of its own, with `environ` on top of this one's environment.

        `python` is another interpreter to run it, which must have holdfast; `host` the address of another host.
        `on_exit` is called once, however the process ends. Raises `ActorStartFailed`.
        """

    def on_host_away(self, told: Callable[[str], None]) -> None:
        """Call `told` in the event loop with a host, as `this_host` is there, that is away from now on."""

    def host_identity(self, host: str) -> str:
        """What `this_host` is on the host with this address; empty if it was never reached."""

    async def close(self) -> None:
        """End all processes. Idempotent."""

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


_current: ContextVar[Engine] = ContextVar("engine")


def current_engine() -> Engine:
    """The engine of the innermost `async with`. Raises `NoEngine`."""
    try:
        return _current.get()
    except LookupError:
        raise NoEngine from None


class EngineContext:
    """Makes an engine the one in use inside of `async with`, and closes it after that."""

    _token: Token[Engine] | None = None

    async def close(self) -> None:
        """See `Engine.close`."""
        raise NotImplementedError

    async def __aenter__(self) -> Self:
        self._token = _current.set(self)  # type: ignore[arg-type]
        return self

    async def __aexit__(self, *error: object) -> None:
        if self._token is not None:
            _current.reset(self._token)
            self._token = None
        await self.close()
