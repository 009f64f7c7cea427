"""OpenEnv's messages as typed values, and their JSON. Decoders are strict: all that they refuse is MalformedMessage."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from holdfast.comms.errors import UNDECODABLE, HoldfastError
from holdfast.rl.environments.environment import Action, Observation, State

MOST_BYTES = 1 << 20
"""The limit of a message, in both directions."""


class MalformedMessage(HoldfastError):
    """Bytes that are no message of the protocol. `code` is the protocol's word for it."""

    def __init__(self, why: str, code: str = "VALIDATION_ERROR") -> None:
        self.why, self.code = why, code
        super().__init__(f"malformed message: {why}")


class ResetData(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The arguments of a reset. Without a seed the server draws one."""

    seed: int | None = None
    episode_id: str | None = None


class ResetRequest(msgspec.Struct, frozen=True, tag_field="type", tag="reset", forbid_unknown_fields=True):
    """Begin an episode."""

    data: ResetData = ResetData()


class StepRequest(msgspec.Struct, frozen=True, tag_field="type", tag="step", forbid_unknown_fields=True):
    """Take an action."""

    data: dict[str, Any]


class StateRequest(msgspec.Struct, frozen=True, tag_field="type", tag="state", forbid_unknown_fields=True):
    """Tell the state."""


class CloseRequest(msgspec.Struct, frozen=True, tag_field="type", tag="close", forbid_unknown_fields=True):
    """End the session."""


Request = ResetRequest | StepRequest | StateRequest | CloseRequest


class ObservationData(msgspec.Struct, frozen=True):
    """An observation on the wire: its text is one of the fields."""

    observation: dict[str, Any]
    reward: float | bool | None = None
    done: bool = False


class ObservationReply(msgspec.Struct, frozen=True, tag_field="type", tag="observation"):
    """The answer to a reset or a step."""

    data: ObservationData


class StateReply(msgspec.Struct, frozen=True, tag_field="type", tag="state"):
    """The answer to a question for the state."""

    data: dict[str, Any]


class ErrorData(msgspec.Struct, frozen=True):
    """What went wrong, in words and in one word."""

    message: str = ""
    code: str = ""


class ErrorReply(msgspec.Struct, frozen=True, tag_field="type", tag="error"):
    """The answer to a request that failed."""

    data: ErrorData


Reply = ObservationReply | StateReply | ErrorReply

_encoder = msgspec.json.Encoder()
_requests = msgspec.json.Decoder(Request)
_replies = msgspec.json.Decoder(Reply)


def encode(message: Request | Reply) -> bytes:
    """The JSON of a message. Raises MalformedMessage for fields that JSON cannot hold."""
    try:
        return _encoder.encode(message)
    except (TypeError, ValueError, RecursionError, UnicodeEncodeError) as error:
        raise MalformedMessage(f"it cannot be written as JSON: {error}") from error


def decode_request(data: bytes) -> Request:
    """A request from its JSON. Raises MalformedMessage."""
    request: Request = _decode(_requests, data)
    return request


def decode_reply(data: bytes) -> Reply:
    """A reply from its JSON; fields that it does not know are ignored. Raises MalformedMessage."""
    reply: Reply = _decode(_replies, data)
    return reply


def _decode(decoder: msgspec.json.Decoder[Any], data: bytes) -> Any:
    try:
        return decoder.decode(data)
    except msgspec.ValidationError as error:
        raise MalformedMessage(str(error)) from error
    except UNDECODABLE as error:
        raise MalformedMessage(str(error), "INVALID_JSON") from error


def action_to_wire(action: Action) -> dict[str, Any]:
    """An action as a flat object. An empty text is left out: an environment of fields alone knows no such name."""
    return dict(action.fields) if not action.text and action.fields else {**action.fields, "text": action.text}


def action_from_wire(data: Mapping[str, Any]) -> Action:
    """An action from a flat object. Raises MalformedMessage for a text of another type."""
    fields = dict(data)
    fields.pop("metadata", None)  # every action of openenv has one
    text = fields.pop("text", "")
    if not isinstance(text, str):
        raise MalformedMessage("'text' of an action is no text")
    return Action(text, fields)


def observation_to_wire(observation: Observation) -> ObservationReply:
    """The reply that carries an observation."""
    fields = {**observation.fields, "text": observation.text}
    return ObservationReply(ObservationData(fields, observation.reward, observation.done))


def observation_from_wire(data: ObservationData) -> Observation:
    """An observation from its reply. Without a text among its fields, their JSON is the text."""
    fields = dict(data.observation)
    fields.pop("metadata", None)
    text = fields.pop("text", None)
    if text is None:
        text = _encoder.encode(fields).decode()
    if not isinstance(text, str):
        raise MalformedMessage("'text' of an observation is no text")
    if data.reward is not None and not math.isfinite(data.reward):
        raise MalformedMessage(f"its reward is {data.reward}")
    reward = None if data.reward is None else float(data.reward)
    return Observation(text=text, fields=fields, reward=reward, done=data.done)


def state_to_wire(state: State) -> StateReply:
    """The reply that carries a state."""
    return StateReply({**state.fields, "episode_id": state.episode_id, "step_count": state.step_count})


def state_from_wire(data: Mapping[str, Any]) -> State:
    """A state from its reply. Raises MalformedMessage if what all states have is missing or of another type."""
    fields = dict(data)
    episode, steps = fields.pop("episode_id", None), fields.pop("step_count", 0)
    if not isinstance(episode, str | None) or type(steps) is not int or steps < 0:
        raise MalformedMessage(f"a state has episode_id={episode!r} and step_count={steps!r}")
    return State(episode_id=episode, step_count=steps, fields=fields)
