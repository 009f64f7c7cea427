"""The static cache of keys and values: slots of one length, allocated once, sequences in the first ones."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Tensor = torch.Tensor


class SlotCache:
    """Keys and values of all layers for `slots` sequences of at most `length` tokens.

    Token i of a sequence lies at position i of its slot, whatever the length of the others. It has the methods that
    models call of transformers' `Cache`.
    """

    is_compileable = False

    def __init__(self, slots: int, length: int) -> None:
        self._slots, self._length = slots, length
        self._layers: list[tuple[Tensor, Tensor]] = []
        self._rows = self._span = 0
        self._start: int | None = None
        self._index: tuple[Tensor, Tensor] | None = None

    def forward(
        self, model: PreTrainedModel, tokens: Tensor, positions: Tensor, start: int | None, last: Tensor | int = 1
    ) -> Tensor:
        """The logits that follow `tokens` (rows, n), one sequence a row, in the first slots.

        `positions` (rows, n) are those of the tokens; `start` is the first one if all rows have the same. `last` are
        the columns to return logits of (a number: the last so many).
        """
        rows, count = tokens.shape
        span = int(positions.max()) + 1 if start is None else start + count
        self._rows, self._span, self._start = rows, span, start
        if start is None:
            self._index = (torch.arange(rows, device=tokens.device).unsqueeze(1), positions)
            hidden = torch.arange(span, device=tokens.device) > positions.unsqueeze(2)
        else:
            hidden = torch.ones(1, count, span, dtype=torch.bool, device=tokens.device).triu(start + 1)
        lowest = torch.finfo(model.dtype).min
        mask = torch.zeros(hidden.shape, dtype=model.dtype, device=tokens.device).masked_fill_(hidden, lowest)
        call: Any = model
        logits: Tensor = call(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask.unsqueeze(1),
            past_key_values=self,
            use_cache=True,
            logits_to_keep=last,
        ).logits
        return logits

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Store the keys and values (rows, heads, n, size) of one layer; returns those of the whole sequences."""
        if layer == len(self._layers):
            self._layers.append((self._room(keys), self._room(values)))
        kept_keys, kept_values = (each[: self._rows, :, : self._span] for each in self._layers[layer])
        if self._start is not None:
            kept_keys[:, :, self._start :] = keys
            kept_values[:, :, self._start :] = values
        else:
            assert self._index is not None
            row, position = self._index
            kept_keys[row, :, position] = keys.transpose(1, 2)
            kept_values[row, :, position] = values.transpose(1, 2)
        return kept_keys, kept_values

    def get_seq_length(self, layer: int = 0) -> int:
        """The tokens of the longest sequence in the last forward."""
        return self._span

    def copy_from(self, other: SlotCache, rows: Tensor, first: int, span: int) -> None:
        """Copy the first `span` positions of the slots `rows` of `other` into the slots from `first` on."""
        if not self._layers:
            self._layers = [(self._room(keys), self._room(values)) for keys, values in other._layers]
        for mine, theirs in zip(self._layers, other._layers, strict=True):
            for here, there in zip(mine, theirs, strict=True):
                here[first : first + len(rows), :, :span] = there[:, :, :span][rows]

    def move(self, source: int, target: int, span: int) -> None:
        """Copy the first `span` positions of a slot into another slot."""
        for layer in self._layers:
            for each in layer:
                each[target, :, :span] = each[source, :, :span]

    def _room(self, like: Tensor) -> Tensor:
        _, heads, _, size = like.shape
        return torch.zeros(self._slots, heads, self._length, size, dtype=like.dtype, device=like.device)
