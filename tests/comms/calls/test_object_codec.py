"""Objects arrive as they were sent, or are refused before anything is sent, with their path."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import math
import uuid
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms.codecs.objects import decode_object, encode_object


class Colour(enum.Enum):
    RED = "red"


class Number(enum.IntEnum):
    ONE = 1


class Word(enum.StrEnum):
    HELLO = "hello"


class Point(msgspec.Struct):
    x: Any


@dataclasses.dataclass
class Pair:
    first: Any


def deep(levels: int) -> list[Any]:
    made: list[Any] = []
    for _ in range(levels):
        made = [made]
    return made


def endless() -> list[Any]:
    made: list[Any] = []
    made.append(made)
    return made


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.text() | st.binary()
keys = st.text() | st.integers(-(2**63), 2**63 - 1) | st.booleans() | st.binary()
objects = st.recursive(scalars, lambda inner: st.lists(inner) | st.dictionaries(keys, inner), max_leaves=20)


def alike(sent: Any, arrived: Any) -> bool:
    """Whether two objects are equal and of the same types at every level."""
    if type(sent) is not type(arrived):
        return False
    if isinstance(sent, dict):
        return list(map(type, sent)) == list(map(type, arrived)) and all(
            alike(sent[key], arrived.get(key, arrived)) for key in sent
        )
    if isinstance(sent, list):
        return len(sent) == len(arrived) and all(map(alike, sent, arrived))
    return bool(sent == arrived) or (isinstance(sent, float) and math.isnan(sent) and math.isnan(arrived))


@given(objects)
def test_an_accepted_object_arrives_as_it_was(obj: Any) -> None:
    assert alike(obj, decode_object(encode_object(obj)))


def test_tuples_arrive_as_lists_and_records_as_dicts() -> None:
    sent = ((1, 2), Point([1]), Pair({"a": (3,)}))
    assert decode_object(encode_object(sent)) == [[1, 2], {"x": [1]}, {"first": {"a": [3]}}]


@pytest.mark.parametrize(
    "bad",
    [
        {1, 2},
        frozenset([1]),
        decimal.Decimal("1.5"),
        datetime.datetime(2026, 1, 1),
        datetime.date(2026, 1, 1),
        datetime.timedelta(1),
        uuid.UUID(int=1),
        Colour.RED,
        Number.ONE,
        Word.HELLO,
        np.float64(1),
        np.int64(1),
        np.ones(2),
        torch.ones(2),
        bytearray(b"1"),
        memoryview(b"1"),
        1j,
        object(),
        int,
        2**70,
        -(2**63) - 1,
        10**5000,
        "\ud800",
        {(1, 2): 3},
        {Colour.RED: 1},
        {1.5: {None: {1}}},
        deep(500),
        deep(100_000),
        endless(),
    ],
    ids=lambda bad: type(bad).__name__,
)
def test_an_object_that_would_arrive_as_another_type_is_a_type_error(bad: Any) -> None:
    for obj in (bad, [0, {"key": bad}], Point(bad), Pair(bad)):
        with pytest.raises(TypeError, match="msgpack"):
            encode_object(obj)


def test_the_error_says_where_the_object_is() -> None:
    with pytest.raises(TypeError, match=r"the object\['a'\]\[1\]\['first'\] is a set"):
        encode_object({"a": [0, Pair({1})]})
    with pytest.raises(TypeError, match=r"a key of the object\['a'\] is a tuple"):
        encode_object({"a": {(1,): 2}})
