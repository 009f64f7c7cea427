"""`Registry`: loads the installed plugins once through pluggy, checks them, and finds backends by name.

A plugin that does not load, or offers something malformed, is left out, and `holdfast backends` shows its error; it
never breaks the others.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

import pluggy

from holdfast.comms.errors import BackendUnavailable
from holdfast.comms.plugins.hints import malformed
from holdfast.comms.plugins.spec import (
    API_VERSION,
    Available,
    BackendInfo,
    Capabilities,
    DetectorInfo,
    HoldfastSpec,
    Unavailable,
)
from holdfast.comms.system import forks
from holdfast.comms.transport.base import Link

if TYPE_CHECKING:
    from holdfast.comms.hooks import Hooks

T = TypeVar("T", BackendInfo, DetectorInfo)

GROUP = "holdfast"
_NAME = re.compile(r"[a-z][a-z0-9_-]*")


class InvalidPlugin(ValueError):
    """A plugin offers something that does not fit the plugin API."""


@dataclass(frozen=True, slots=True)
class Backend:
    """A backend and whether it can run here."""

    info: BackendInfo
    status: Available | Unavailable

    @property
    def available(self) -> bool:
        return isinstance(self.status, Available)

    @property
    def missing(self) -> Unavailable | None:
        """Why it can run neither here nor in processes that its launcher starts; None if it can."""
        status = self.status
        return status if isinstance(status, Unavailable) and not status.needs_launcher else None


class Registry:
    """All plugins of this process. `load` adds the installed ones, `register` adds one by hand."""

    def __init__(self) -> None:
        self.manager = pluggy.PluginManager("holdfast")
        self.manager.add_hookspecs(HoldfastSpec)
        self._backends: dict[str, BackendInfo] = {}
        self._detectors: dict[str, DetectorInfo] = {}
        self._offers: dict[int, tuple[dict[str, BackendInfo], dict[str, DetectorInfo]]] = {}
        """What each plugin offers, by its id."""
        self._probed: dict[str, Available | Unavailable] = {}
        self._broken: dict[str, str] = {}
        self.observed = False
        """True while any plugin observes ops."""
        self._observers: forks.Living[Hooks] = forks.Living()

    @property
    def backends(self) -> Mapping[str, BackendInfo]:
        """Every backend that registered, by name."""
        return MappingProxyType(self._backends)

    @property
    def detectors(self) -> Mapping[str, DetectorInfo]:
        """Every failure detector that registered, by name."""
        return MappingProxyType(self._detectors)

    @property
    def broken(self) -> Mapping[str, str]:
        """Plugins that were left out, by entry point, and why."""
        return MappingProxyType(self._broken)

    def load(self) -> None:
        """Load every plugin installed under the entry-point group; note those that fail."""
        for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda p: p.name):
            if self.manager.get_plugin(point.name) is not None:
                continue
            try:
                self.register(point.load(), point.name)
            except Exception as error:
                self._broken[point.name] = f"{type(error).__name__}: {error}"

    def register(self, plugin: object, name: str | None = None) -> None:
        """Check a plugin and add all its offers; or raise `InvalidPlugin` or pluggy's error, and add none."""
        self.manager.register(plugin, name)
        try:
            self.manager.check_pending()
            backends = _checked("backend", getattr(plugin, "holdfast_backends", list)(), _check, self._backends)
            detectors = _checked(
                "detector", getattr(plugin, "holdfast_detectors", list)(), _check_detector, self._detectors
            )
        except Exception:
            self.manager.unregister(plugin)
            raise
        self._offers[id(plugin)] = backends, detectors
        self._backends.update(backends)
        self._detectors.update(detectors)
        self._look_for_observers()

    def unregister(self, plugin: object) -> None:
        """Remove a plugin, its backends and its detectors."""
        self.manager.unregister(plugin)
        backends, detectors = self._offers.pop(id(plugin))
        for name in backends:
            del self._backends[name]
            self._probed.pop(name, None)
        for name in detectors:
            del self._detectors[name]
        self._look_for_observers()

    def _look_for_observers(self) -> None:
        hooks = self.manager.hook
        self.observed = bool(hooks.before_op.get_hookimpls() or hooks.after_op.get_hookimpls())
        for observer in self._observers:
            observer.plugins_changed()

    def follow(self, observer: Hooks) -> None:
        """Call `observer.plugins_changed()` after each change of the plugins, while it lives."""
        self._observers.add(observer)

    def by_priority(self, purpose: str) -> list[str]:
        """The backends that "auto" may take for a device type, or for "memory": the highest priority first."""
        able = {name: info.auto[purpose] for name, info in self._backends.items() if info.auto.get(purpose, 0) > 0}
        return sorted(able, key=lambda name: (-able[name], name))

    def backend(self, name: str) -> Backend:
        """The backend called `name`, probed once. Raises `BackendUnavailable` for an unknown name."""
        info = self._backends.get(name)
        if info is None:
            reason = f"unknown; known are {', '.join(sorted(self._backends))}"
            if broken := self._broken.get(name):
                reason = f"its plugin is broken: {broken}"
            raise BackendUnavailable(name, reason, _install_hint(name))
        return Backend(info, self.status_of(info))

    def status_of(self, info: BackendInfo) -> Available | Unavailable:
        """Whether a backend can run here, probed once."""
        status = self._probed.get(info.name)
        if status is None:
            try:
                status = info.probe()
            except Exception as error:
                status = Unavailable(f"its probe failed: {type(error).__name__}: {error}")
            self._probed[info.name] = status
        return status


def _checked(kind: str, offered: Iterable[T], check: Callable[[T], None], known: Mapping[str, object]) -> dict[str, T]:
    """What a plugin offers, by name. Raises `InvalidPlugin` for a malformed offer, and for a name that is taken."""
    found: dict[str, T] = {}
    for info in offered:
        check(info)
        if info.name in known or info.name in found:
            raise InvalidPlugin(f"a {kind} named {info.name!r} is registered already")
        found[info.name] = info
    return found


def _check(info: Any) -> None:
    if not isinstance(info, BackendInfo):
        raise InvalidPlugin(f"holdfast_backends() must return BackendInfo objects, not {type(info).__name__}")
    _check_name_and_version("backend", info.name, info.api)
    if not isinstance(info.capabilities, Capabilities):
        raise InvalidPlugin(f"backend {info.name!r}: capabilities must be a Capabilities object")
    if not callable(info.probe):
        raise InvalidPlugin(f"backend {info.name!r}: probe must be callable")
    for part in ("connect", "memory", "prepare"):
        if not (getattr(info, part) is None or callable(getattr(info, part))):
            raise InvalidPlugin(f"backend {info.name!r}: {part} must be callable or None")
    if info.connect is None and info.memory is None:
        raise InvalidPlugin(f"backend {info.name!r} offers neither connect nor memory")
    priorities = info.auto.items() if isinstance(info.auto, Mapping) else [(None, None)]
    if not all(isinstance(key, str) and isinstance(value, int) for key, value in priorities):
        raise InvalidPlugin(f"backend {info.name!r}: auto must map device types, or 'memory', to whole numbers")
    if not isinstance(info.links, tuple) or not all(isinstance(link, Link) for link in info.links):
        raise InvalidPlugin(f"backend {info.name!r}: links must be a tuple of Link objects")
    if not isinstance(info.hints, tuple):
        raise InvalidPlugin(f"backend {info.name!r}: hints must be a tuple of Hint objects")
    for position, hint in enumerate(info.hints):
        if (wrong := malformed(hint)) is not None:
            raise InvalidPlugin(f"backend {info.name!r}: {wrong}")
        if hint.name in {earlier.name for earlier in info.hints[:position]}:
            raise InvalidPlugin(f"backend {info.name!r} announces the hint {hint.name!r} twice")


def _install_hint(name: str) -> str:
    """What to install for a backend that no plugin offers."""
    if name in (importlib.metadata.metadata("holdfast").get_all("Provides-Extra") or ()):
        return f"pip install 'holdfast[{name}]'"
    return f"a plugin package adds a backend through the entry-point group {GROUP!r}"


def _check_detector(info: Any) -> None:
    if not isinstance(info, DetectorInfo):
        raise InvalidPlugin(f"holdfast_detectors() must return DetectorInfo objects, not {type(info).__name__}")
    _check_name_and_version("detector", info.name, info.api)
    if info.evidence not in ("proof", "suspicion"):
        raise InvalidPlugin(f"detector {info.name!r}: evidence must be 'proof' or 'suspicion', not {info.evidence!r}")
    for part in ("probe", "make"):
        if not callable(getattr(info, part)):
            raise InvalidPlugin(f"detector {info.name!r}: {part} must be callable")


def _check_name_and_version(kind: str, name: Any, api: Any) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidPlugin(f"{name!r} is not a {kind} name; use lower-case letters, digits, '-' and '_'")
    major, minor = API_VERSION
    if not isinstance(api, tuple) or len(api) != 2:
        raise InvalidPlugin(f"{kind} {name!r}: api must be (major, minor), not {api!r}")
    if api[0] < major:
        raise InvalidPlugin(
            f"{kind} {name!r} was built for plugin API {_version(api)}, too old for this holdfast "
            f"({major}.0 to {major}.{minor}); install a newer release of the plugin"
        )
    if api > API_VERSION:
        raise InvalidPlugin(
            f"{kind} {name!r} was built for plugin API {_version(api)}, too new for this holdfast "
            f"({major}.0 to {major}.{minor}); install a newer holdfast"
        )


def _version(api: tuple[int, int]) -> str:
    return ".".join(map(str, api))


@functools.cache
def registry() -> Registry:
    """The registry of this process, with every installed plugin loaded."""
    found = Registry()
    found.load()
    return found


def plugin_manager() -> pluggy.PluginManager:
    """The pluggy manager behind the registry, for hooks other than backends."""
    return registry().manager


def backends() -> dict[str, Backend]:
    """Every backend by name, with its capabilities and whether it can run here, or why not."""
    return {name: registry().backend(name) for name in sorted(registry().backends)}


def register(plugin: object) -> None:
    """Add a plugin (a backend, an observer of ops ...) to this process by hand."""
    registry().register(plugin)


def unregister(plugin: object) -> None:
    """Remove a plugin that `register` added."""
    registry().unregister(plugin)
