"""Messages are matched to their receives, whichever come first."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from holdfast.comms import Mismatch, OpTimeout, PeerFailed, StillRunning
from holdfast.comms.torchdist.message_matcher import Header, MessageMatcher, PendingRecv
from holdfast.comms.torchdist.works import TorchWork

SENDERS, TAGS = (0, 1), (0, 1, 2)


def arrive(matcher: MessageMatcher, src: int, tag: int, number: int) -> None:
    """Deliver a message as a channel's thread does."""
    payload = torch.tensor([number])
    header = Header(tag, payload.nbytes, payload.dtype)
    expected = matcher.claim(src, header)
    if expected is None:
        matcher.keep(src, header, payload.view(torch.uint8))
    else:
        expected.take(src, header, payload.view(torch.uint8))


def expect(matcher: MessageMatcher, src: int | None, tag: int, timeout: float = 60.0) -> PendingRecv:
    return matcher.expect(torch.zeros(1, dtype=torch.int64), src, tag, timeout)


events = st.lists(
    st.one_of(
        st.tuples(st.just("send"), st.sampled_from(SENDERS), st.sampled_from(TAGS)),
        st.tuples(st.just("recv"), st.sampled_from((*SENDERS, None)), st.sampled_from(TAGS)),
    )
)


@given(events)
def test_messages_of_one_sender_and_tag_arrive_in_order_and_none_twice(given: list[tuple[str, int, int]]) -> None:
    matcher, receives, sent = MessageMatcher(3), [], 0
    for kind, rank, tag in given:
        if kind == "send":
            arrive(matcher, rank, tag, 1000 * rank + 100 * tag + sent)
            sent += 1
        else:
            receives.append((rank, tag, expect(matcher, rank, tag)))
    received = [(src, tag, int(each.tensor)) for src, tag, each in receives if each.done()]
    assert len({number for _, _, number in received}) == len(received)
    for src, tag, number in received:
        assert number // 100 % 10 == tag and src in (None, number // 1000)
    for src in SENDERS:
        for tag in TAGS:
            named = [number for src_, tag_, number in received if (src_, tag_) == (src, tag)]
            assert named == sorted(named)
    waiting = [(src, tag) for src, tag, each in receives if not each.done()]
    assert not any(matcher._kept.get((rank, tag)) for src, tag in waiting for rank in SENDERS if src in (rank, None))


def test_a_receive_of_another_size_or_dtype_says_what_was_sent() -> None:
    matcher = MessageMatcher(2)
    for wrong in (torch.zeros(2, dtype=torch.int64), torch.zeros(1, dtype=torch.float64)):
        arrive(matcher, 0, 5, 1)
        with pytest.raises(Mismatch, match=r"rank 0 sent 8 bytes of torch\.int64 under tag 5"):
            matcher.expect(wrong, 0, 5, 60.0).wait()


def test_a_receive_expires_unless_its_message_has_begun_to_arrive() -> None:
    matcher = MessageMatcher(2)
    late, begun = expect(matcher, 1, 0, 0.01), expect(matcher, 1, 1, 0.05)
    assert matcher.claim(1, Header(1, begun.tensor.nbytes, begun.tensor.dtype)) is begun
    with pytest.raises(OpTimeout, match="rank 1"):
        late.wait()
    with pytest.raises(TimeoutError, match="goes on"):
        begun.wait(0.1)
    begun.run(lambda: None)
    begun.wait()


def test_nothing_more_comes_from_a_dead_sender_but_what_was_kept() -> None:
    matcher = MessageMatcher(2)
    arrive(matcher, 1, 0, 7)
    pending = expect(matcher, 1, 3)
    matcher.fail(1, PeerFailed((1,), "gone"))
    with pytest.raises(PeerFailed):
        pending.wait()
    assert int(expect(matcher, 1, 0).tensor) == 7
    with pytest.raises(PeerFailed):
        expect(matcher, 1, 0)


def test_a_wait_lasts_no_longer_than_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock runs as fast as the receive waits: what counts is the sum of all its waits."""
    waits: list[float] = []

    class Never(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            waits.append(timeout or 0.0)
            clock[0] += timeout or 0.0
            return False

    clock = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    matcher = MessageMatcher(2)
    pending = expect(matcher, 0, 3, timeout=60.0)
    pending._done = Never()
    for timeout in (2.0, 0.0, 5.0):
        waits.clear()
        with pytest.raises(StillRunning, match=f"after {timeout:g} s"):
            pending.wait(timeout)
        assert sum(waits) == pytest.approx(timeout)
    both = TorchWork([pending, expect(matcher, 1, 3)], [], 60.0, 0)
    waits.clear()
    with pytest.raises(StillRunning):
        both.wait(timedelta(seconds=7))
    assert sum(waits) == pytest.approx(7.0)
