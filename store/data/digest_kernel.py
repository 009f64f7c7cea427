"""Checksums (xxh3, 64 bits) of pieces in CUDA memory by a Triton kernel, which can copy them too.

One program of one warp has a piece: its lanes are scrambled every 1024 bytes, in sequence. Tested in Triton's
interpreter, on CPU memory (`TRITON_INTERPRET=1`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import torch
import triton
import triton.language as tl

from holdfast.store.data.digests import Words

_LOW, _HALF = np.uint64(0xFFFFFFFF), np.uint64(32)
_SECRET = bytes.fromhex(
    "b8fe6c3923a44bbe7c01812cf721ad1cded46de9839097db7240a4a4b7b3671fcb79e64eccc0e578825ad07dccff7221"
    "b8084674f743248ee03590e6813a264c3c2852bb91c300cb88d0658b1b532ea371644897a20df94e3819ef46a9deacd8"
    "a8fa763fe39c343ff9dcbbc7c70b4f1d8a51e04bcdb45931c89f7ec9d9787364eac5ac8334d3ebc3c581a0fffa1363eb"
    "170ddd51b7f0da49d316552629d4689e2b16be587d47a1fc8ff8b8d17ad031ce45cb3a8f95160428afd7fbcabb4b407e"
)
_START = (
    0xC2B2AE3D,
    0x9E3779B185EBCA87,
    0xC2B2AE3D27D4EB4F,
    0x165667B19E3779F9,
    0x85EBCA77C2B2AE63,
    0x85EBCA77,
    0x27D4EB2F165667C5,
    0x9E3779B1,
)
BLOCKS_AHEAD = 8
"""Blocks of 1024 bytes that a program loads at once: a processor has few programs to hide the latency of memory."""


@triton.jit
def digest_lanes(table, secret, start, found, copies: tl.constexpr, ahead: tl.constexpr):
    """XXH3's eight lanes of each piece before its last 64 bytes, and those, as 16 words of `found` a piece.

    `table` has the address and the size of each piece, and where it is copied to. A block of 1024 bytes is a sum, so
    `ahead` of them are loaded at once; only the scramble after each goes in sequence.
    """
    piece = tl.program_id(0)
    lane = tl.arange(0, 8)
    row = tl.arange(0, 16)
    byte = tl.arange(0, 64)
    block = tl.arange(0, ahead)
    data = tl.load(table + piece * 3).to(tl.pointer_type(tl.uint64))
    nbytes = tl.load(table + piece * 3 + 1)
    target = tl.load(table + piece * 3 + 2).to(tl.pointer_type(tl.uint64))
    last = tl.load(data.to(tl.pointer_type(tl.uint8)) + (nbytes - 64) + byte)
    tl.store((found + piece * 16 + 8).to(tl.pointer_type(tl.uint8)) + byte, last)
    if copies:
        tl.store(target.to(tl.pointer_type(tl.uint8)) + (nbytes - 64) + byte, last)
    left = (nbytes - 1) // 64
    word = lane[:, None] + row[None, :] * 8
    words = lane[:, None, None] + block[None, :, None] * 128 + row[None, None, :] * 8  # a thread sums rows
    keys = tl.load(secret + lane[:, None] + row[None, :])
    scramble = tl.load(secret + 16 + lane)
    sums = tl.load(start + lane)
    while left >= 16 * ahead:
        value = tl.load(data + words)
        if copies:
            tl.store(target + words, value)
        key = value ^ keys[:, None, :]
        added = tl.sum((key & 0xFFFFFFFF) * (key >> 32) + tl.load(data + (words ^ 1)), axis=2)
        for number in tl.static_range(ahead):
            sums += tl.sum(added * (block == number).to(tl.uint64)[None, :], axis=1)
            sums = (sums ^ (sums >> 47) ^ scramble) * 0x9E3779B1
        data += 128 * ahead
        target += 128 * ahead
        left -= 16 * ahead
    while left > 0:
        inside = (lane < 8)[:, None] & (row < left)[None, :]
        value = tl.load(data + word, mask=inside, other=0)
        if copies:
            tl.store(target + word, value, mask=inside)
        key = value ^ keys
        product = (key & 0xFFFFFFFF) * (key >> 32) + tl.load(data + (word ^ 1), mask=inside, other=0)
        sums += tl.sum(tl.where(inside, product, 0).to(tl.uint64), axis=1)
        if left >= 16:
            sums = (sums ^ (sums >> 47) ^ scramble) * 0x9E3779B1
        data += 128
        target += 128
        left -= 16
    tl.store(found + piece * 16 + lane, sums)


def begin_digests(
    addresses: Words, sizes: Words, device: torch.device, targets: Words | None = None
) -> Callable[[], Words]:
    """Begin to compute xxh3 (64 bits) of pieces: what is returned gives them once the current stream is synchronized.

    The pieces have at least `LEAST_BYTES`, and lie at addresses of the device that are multiples of 8. They are copied
    to such addresses `targets`, if these are given.
    """
    columns = addresses, sizes, addresses if targets is None else targets
    table = torch.from_numpy(np.stack(columns, axis=1).astype(np.uint64).view(np.int64))
    if device.type == "cuda":
        table = table.pin_memory().to(device, non_blocking=True)
    lanes = torch.empty(16 * len(sizes), dtype=torch.uint64, device=device)
    secret, start = _constants(device)
    digest_lanes[(len(sizes),)](
        table, secret, start, lanes, copies=targets is not None, ahead=BLOCKS_AHEAD, num_warps=1
    )
    found = lanes.to("cpu", non_blocking=True)

    def result() -> Words:
        words: Words = found.numpy().reshape(-1, 16)
        return _finish(words[:, :8], words[:, 8:], sizes)

    return result


@functools.cache
def _constants(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The secret, and the lanes at the start."""
    data = _SECRET, np.array(_START, np.uint64).tobytes()
    secret, start = (torch.frombuffer(bytearray(each), dtype=torch.uint64).to(device) for each in data)
    return secret, start


def _finish(lanes: Words, ends: Words, sizes: Words) -> Words:
    """The checksums, from the lanes of each piece before its last 64 bytes and those bytes."""
    lanes = lanes + ends[:, [1, 0, 3, 2, 5, 4, 7, 6]]
    key = ends ^ _secret_at(121, 8)
    lanes += (key & _LOW) * (key >> _HALF)
    total: Words = sizes.astype(np.uint64) * np.uint64(0x9E3779B185EBCA87)
    mixed = lanes ^ _secret_at(11, 8)
    for pair in range(0, 8, 2):
        left, right = mixed[:, pair], mixed[:, pair + 1]
        total += left * right ^ _high_product(left, right)
    total = (total ^ total >> np.uint64(37)) * np.uint64(0x165667919E3779F9)
    total ^= total >> _HALF
    return total


def _high_product(left: Words, right: Words) -> Words:
    """The upper 64 bits of products."""
    low, cross = (left & _LOW) * (right & _LOW), (left & _LOW) * (right >> _HALF)
    other, high = (left >> _HALF) * (right & _LOW), (left >> _HALF) * (right >> _HALF)
    middle = (low >> _HALF) + (cross & _LOW) + (other & _LOW)
    found: Words = high + (cross >> _HALF) + (other >> _HALF) + (middle >> _HALF)
    return found


def _secret_at(start: int, count: int) -> Words:
    return np.frombuffer(_SECRET, "<u8", count, start)
