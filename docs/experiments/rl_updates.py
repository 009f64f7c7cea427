"""How soon do all generators serve a step's weights? `python docs/experiments/rl_updates.py`.

Trains a Llama of 9.9 million parameters over two trainers (FSDP2) and two generators, in turns. Prints the time from a
committed step to the last generator that serves its weights.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Split

from holdfast.ft.processes.zygote_client import shut_down
from holdfast.harness.training.driver import train_here
from holdfast.rl.config.toml import config_of
from holdfast.rl.data.prompts import ARITHMETIC_CHARACTERS
from holdfast.rl.generators.models import ModelSource, save_model
from holdfast.rl.run.run_events import Event, WeightsServed

MEDIUM_LLAMA = {
    "model_type": "llama",
    "vocab_size": len(ARITHMETIC_CHARACTERS),
    "hidden_size": 320,
    "intermediate_size": 864,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
}
"""A Llama of 9.9 million parameters for the arithmetic task."""

WARM = 5
"""Versions that are not counted: generators allocate what versions are read into, and trainers their buffers."""


def save_policy(folder: Path, llama: Mapping[str, Any]) -> None:
    """Write a model of the arithmetic task and its tokenizer as a folder of transformers."""
    from transformers import PreTrainedTokenizerFast

    save_model(ModelSource(config=dict(llama), seed=0).build(), folder)
    words = Tokenizer(WordLevel({each: number for number, each in enumerate(ARITHMETIC_CHARACTERS)}, unk_token="\n"))
    words.pre_tokenizer = Split("", "isolated")
    make: Any = PreTrainedTokenizerFast  # its constructor has no types
    make(tokenizer_object=words).save_pretrained(str(folder))


def measure(steps: int, llama: Mapping[str, Any] = MEDIUM_LLAMA) -> tuple[float, ...]:
    """Seconds from the commit of each step to the last generator that serves it."""
    seen: list[Event] = []
    with tempfile.TemporaryDirectory(prefix="holdfast-updates-") as folder:
        path = Path(folder)
        save_policy(path / "policy", llama)
        config = {
            "steps": steps,
            "model": {"path": str(path / "policy")},
            "algorithm": {"mode": "synchronous", "staleness": 0, "groups": 4},
            "sampling": {"group": 4, "batch": 2, "max_new_tokens": 2},
            "trainer": {"spares": 0},
            "evaluation": {"every": 0},
        }
        train_here(config_of(config, "updates"), path / "run", observers=(seen.append,))
    slowest: dict[int, float] = {}
    for event in seen:
        if isinstance(event, WeightsServed):
            slowest[event.version] = max(event.seconds, slowest.get(event.version, 0.0))
    return tuple(slowest[version] for version in sorted(slowest))[WARM:]


def line(seconds: Sequence[float]) -> str:
    """The figures in words."""
    return (
        f"committed step to all generators serving it: median {statistics.median(seconds) * 1e3:.1f} ms, "
        f"best {min(seconds) * 1e3:.1f} ms, worst {max(seconds) * 1e3:.1f} ms, of {len(seconds)}"
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--hidden-size", type=int, default=320, help="320: 9.9 million parameters")
    asked = parser.parse_args()
    print(line(measure(asked.steps, {**MEDIUM_LLAMA, "hidden_size": asked.hidden_size})))
    shut_down()
