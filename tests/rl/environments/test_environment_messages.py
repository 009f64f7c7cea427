"""OpenEnv's messages: what is encoded decodes to the same, and arbitrary bytes are refused by a typed error."""

from __future__ import annotations

import json
import math

from hypothesis import example, given
from hypothesis import strategies as st

from holdfast.rl.environments import messages
from holdfast.rl.environments.environment import Action, Observation, State
from holdfast.rl.environments.messages import MalformedMessage

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=8,
)
FIELDS = st.dictionaries(TEXT.filter(lambda name: name not in RESERVED), JSON, max_size=4)
RESERVED = {"text", "metadata", "prompt", "episode_id", "step_count"}
REWARDS = st.none() | st.floats(allow_nan=False, allow_infinity=False)


@given(st.builds(Action, TEXT, FIELDS))
def test_an_action_arrives_as_it_was_sent(action: Action) -> None:
    request = messages.StepRequest(messages.action_to_wire(action))
    arrived = messages.decode_request(messages.encode(request))
    assert isinstance(arrived, messages.StepRequest)
    assert messages.action_from_wire(arrived.data) == action


@given(st.builds(Observation, text=TEXT, fields=FIELDS, reward=REWARDS, done=st.booleans()))
def test_an_observation_arrives_as_it_was_sent(observation: Observation) -> None:
    arrived = messages.decode_reply(messages.encode(messages.observation_to_wire(observation)))
    assert isinstance(arrived, messages.ObservationReply)
    assert messages.observation_from_wire(arrived.data) == observation


@given(st.builds(State, episode_id=st.none() | TEXT, step_count=st.integers(0, 2**31), fields=FIELDS))
def test_a_state_arrives_as_it_was_sent(state: State) -> None:
    arrived = messages.decode_reply(messages.encode(messages.state_to_wire(state)))
    assert isinstance(arrived, messages.StateReply)
    assert messages.state_from_wire(arrived.data) == state


KINDS = st.sampled_from(["reset", "step", "state", "close", "observation", "error", "other", None])
BODIES = JSON | st.dictionaries(st.sampled_from(["observation", "reward", "done", "seed", "message", "code"]), JSON)
SHAPED = st.builds(lambda kind, data: {"type": kind, "data": data}, KINDS, BODIES)


@given(st.binary(max_size=60) | TEXT.map(str.encode) | (JSON | SHAPED).map(lambda value: json.dumps(value).encode()))
@example(b'{"type":"step","data":{"a":NaN}}')
@example(b'{"type":"observation","data":{"observation":{},"reward":1e999}}')
@example(b'{"type":"step"}')
@example(b"[" * 100_000)
@example(b'{"type":"reset","data":{"seed":1e30}}')
@example(b'{"type":"reset","data":{"seed":1,"extra":2}}')
@example(b'\xff{"type":"close"}')
def test_decoders_take_any_bytes_and_raise_one_type(data: bytes) -> None:
    try:
        request = messages.decode_request(data)
        if isinstance(request, messages.StepRequest):
            assert isinstance(messages.action_from_wire(request.data).text, str)
    except MalformedMessage as error:
        assert error.code in ("INVALID_JSON", "VALIDATION_ERROR")
    try:
        reply = messages.decode_reply(data)
        if isinstance(reply, messages.ObservationReply):
            observation = messages.observation_from_wire(reply.data)
            assert observation.reward is None or math.isfinite(observation.reward)
        if isinstance(reply, messages.StateReply):
            assert messages.state_from_wire(reply.data).step_count >= 0
    except MalformedMessage as error:
        assert error.code in ("INVALID_JSON", "VALIDATION_ERROR")


def test_messages_have_openenvs_form() -> None:
    assert json.loads(messages.encode(messages.ResetRequest(messages.ResetData(3)))) == {
        "type": "reset",
        "data": {"seed": 3, "episode_id": None},
    }
    assert json.loads(messages.encode(messages.observation_to_wire(Observation(text="hi", fields={"a": 1})))) == {
        "type": "observation",
        "data": {"observation": {"a": 1, "text": "hi"}, "reward": None, "done": False},
    }


def test_an_observation_without_a_text_is_read_as_json() -> None:
    data = messages.ObservationData({"board": [1, 2], "metadata": {}}, reward=True)
    assert messages.observation_from_wire(data) == Observation(
        text='{"board":[1,2]}', fields={"board": [1, 2]}, reward=1.0
    )
