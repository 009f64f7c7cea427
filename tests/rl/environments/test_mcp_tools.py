"""The example of tool use over MCP: an episode that is won, texts of any kind, and servers that fail."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("mcp", reason="pip install 'holdfast[mcp]'")

from holdfast.rl.config.named_code import load_code
from holdfast.rl.environments.environment import Action
from holdfast.rl.environments.registry import environment_factory
from support.leaks import children
from support.source_tree import ROOT

pytestmark = pytest.mark.thorough  # each server takes seconds to import its library

NAME = f"{ROOT / 'examples' / 'rl' / 'mcp_tools.py'}:stock_tools"
example: Any = sys.modules[load_code(NAME).__module__]


def call(tool: str, **arguments: object) -> Action:
    return Action(json.dumps({"tool": tool, "arguments": arguments}))


@pytest.fixture(scope="module")
def environment() -> Iterator[Any]:
    found = environment_factory(f"python:{NAME}")()
    found.reset(0)  # starts its process
    yield found
    found.close()


def test_an_episode_with_tools_is_won_by_using_them(environment: Any) -> None:
    for seed in range(3):
        seen = environment.reset(seed)
        assert seen.fields["tools"] == ["add", "multiply", "stock"]
        question = seen.text.splitlines()[-1].removesuffix("?").replace(",", "").split()
        one, factor, other = question[5], int(question[7]), question[-1]
        have = [int(environment.step(call("stock", item=item)).text) for item in (one, other)]
        product = environment.step(Action("so: " + call("multiply", a=have[0], b=factor).text + " I think"))
        total = environment.step(call("add", a=int(product.text), b=have[1]))
        assert total.reward == 0.0
        last = environment.step(Action(json.dumps({"answer": int(total.text)})))
        assert (last.reward, last.done, last.fields) == (1.0, True, {"calls": 4})


@given(
    text=st.text(max_size=40)
    | st.sampled_from(
        ['{"tool": 1}', '{"tool": "add", "arguments": 3}', '{"a": {"answer": 1}}', '{"tool": "divide"}', "{" * 3000]
    )
)
def test_any_text_is_answered(environment: Any, text: str) -> None:
    assert environment.step(Action(text)).reward == 0.0


def test_a_wrong_call_is_an_answer_to_read(environment: Any) -> None:
    for wrong in (call("add", a=2), call("divide")):
        seen = environment.step(wrong)
        assert seen.text.startswith("error:") and seen.fields == {"failed": True}


@pytest.mark.parametrize(("number", "words"), [(signal.SIGKILL, "closed"), (signal.SIGSTOP, "[Tt]imed out")])
def test_a_server_that_ends_or_hangs_costs_an_episode(number: signal.Signals, words: str) -> None:
    environment = example.ToolEnvironment(example.SERVER, example.stock_task)
    before = children()
    environment.reset(0)
    (server,) = children().keys() - before
    os.kill(server, number)
    environment._timeout = 1.0
    with pytest.raises(Exception, match=words):
        environment.step(call("add", a=1, b=1))
    environment.close()
    environment._timeout = 20.0
    environment.reset(0)
    assert environment.step(call("add", a=1, b=1)).text == "2"
    environment.close()
    assert children() == before


def test_a_server_of_its_own_for_each_episode() -> None:
    environment = example.ToolEnvironment(example.SERVER, example.stock_task, fresh=True)
    before, servers = children(), set()
    for seed in range(2):
        environment.reset(seed)
        servers |= children().keys() - before
    environment.close()
    assert len(servers) == 2 and children() == before


def test_a_program_that_is_no_server_is_refused() -> None:
    environment = example.ToolEnvironment([sys.executable, "-c", "pass"], example.stock_task)
    with pytest.raises(Exception, match="closed"):
        environment.reset(0)
    environment.close()
