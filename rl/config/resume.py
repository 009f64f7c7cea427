"""A configuration as text, and whether a run may go on with another one."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.rl.config.errors import ConfigChanged, Key, dotted
from holdfast.rl.config.named_code import placed_code
from holdfast.rl.config.run_config import RunConfig

MAY_CHANGE: frozenset[Key] = frozenset(
    {
        ("steps",),
        ("algorithm", "concurrency"),
        ("trainer", "replicas"),
        ("trainer", "spares"),
        ("trainer", "copies"),
        ("trainer", "backend"),
        ("trainer", "strategy"),
        ("generator",),
        ("store",),
        ("engine",),
        ("evaluation",),
        ("checkpoint",),
        ("telemetry",),
        ("environment", "addresses"),
        ("environment", "servers"),
        ("environment", "sessions"),
        ("environment", "timeout"),
        ("environment", "attempts"),
    }
)
"""What may differ when a run is resumed: how many processes do the work, and where, not what they compute."""


def resolved(config: RunConfig) -> str:
    """The whole configuration as TOML, with every default; read again it is equal."""
    return dump(msgspec.to_builtins(config))


def dump(document: Mapping[str, object]) -> str:
    """A document of tables, arrays of tables and plain values as TOML."""
    return "\n".join(_table(document, "")) + "\n"


def placed(config: RunConfig, folder: Path) -> RunConfig:
    """The configuration with its paths, relative to `folder`, made absolute, so that a run goes on from anywhere."""

    def absolute(path: str) -> str:
        return str((folder / path).absolute()) if path else ""

    return msgspec.structs.replace(
        config,
        model=msgspec.structs.replace(config.model, path=absolute(config.model.path)),
        environment=msgspec.structs.replace(config.environment, name=_placed_environment(config, folder)),
        reward=tuple(
            msgspec.structs.replace(
                each,
                function=placed_code(each.function, folder),
            )
            for each in config.reward
        ),
        data=msgspec.structs.replace(
            config.data, train=absolute(config.data.train), held_out=absolute(config.data.held_out)
        ),
        generator=msgspec.structs.replace(config.generator, python=absolute(config.generator.python)),
        trainer=msgspec.structs.replace(config.trainer, python=absolute(config.trainer.python)),
    )


def _placed_environment(config: RunConfig, folder: Path) -> str:
    kind, _, code = config.environment.name.partition(":")
    return f"{kind}:{placed_code(code, folder)}" if kind == "python" else config.environment.name


def fingerprint(config: RunConfig) -> str:
    """32 hexadecimal digits that depend on every field that a resumed run must not change."""
    fixed = {dotted(key): value for key, value in _leaves(msgspec.to_builtins(config)) if not _may_change(key)}
    return hashlib.blake2b(msgspec.json.encode(fixed, order="sorted"), digest_size=16).hexdigest()


def check_unchanged(begun: RunConfig, now: RunConfig) -> None:
    """Raise `ConfigChanged` unless a run that was `begun` may go on as `now`."""
    if found := differences(begun, now):
        raise ConfigChanged(found)


def differences(begun: RunConfig, now: RunConfig) -> tuple[str, ...]:
    """The fields that a resumed run must not change and that differ, each with both values."""
    old, new = (dict(_leaves(msgspec.to_builtins(each))) for each in (begun, now))
    return tuple(
        f"{dotted(key)} was {old.get(key, 'absent')!r} and is {new.get(key, 'absent')!r}"
        for key in sorted({**old, **new}, key=dotted)
        if not _may_change(key) and old.get(key) != new.get(key)
    )


def _may_change(key: Key) -> bool:
    return any(key[:end] in MAY_CHANGE for end in range(1, len(key) + 1))


def _leaves(value: Any, key: Key = ()) -> Iterator[tuple[Key, Any]]:
    if isinstance(value, dict):
        for name, each in value.items():
            yield from _leaves(each, (*key, name))
    elif isinstance(value, list | tuple) and any(isinstance(each, dict) for each in value):
        for number, each in enumerate(value):
            yield from _leaves(each, (*key, number))
    else:
        yield key, list(value) if isinstance(value, tuple) else value


def _table(values: Mapping[str, object], name: str) -> Iterator[str]:
    tables = {key: value for key, value in values.items() if isinstance(value, Mapping) or _is_array(value)}
    for key, value in values.items():
        if key not in tables:
            yield f"{key} = {_plain(value)}"
    for key, value in tables.items():
        full = f"{name}.{key}" if name else key
        for each in [value] if isinstance(value, Mapping) else value:  # type: ignore[attr-defined]
            yield ""
            yield f"[{full}]" if isinstance(value, Mapping) else f"[[{full}]]"
            yield from _table(each, full)


def _is_array(value: object) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(each, Mapping) for each in value)


def _plain(value: object) -> str:
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Sequence):
        return f"[{', '.join(map(_plain, value))}]"
    return repr(value)
