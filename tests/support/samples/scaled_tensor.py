"""A tensor subclass made of inner tensors, as quantization libraries write them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from torch.utils._pytree import tree_map

Tensor = torch.Tensor


class Rounding(StrEnum):
    NEAREST = "nearest"
    STOCHASTIC = "stochastic"


@dataclass(frozen=True)
class Recipe:
    """How a tensor was scaled."""

    rounding: Rounding
    block: tuple[int, ...]

    def __post_init__(self) -> None:
        constructed.append(self)


constructed: list[Recipe] = []


class ScaledTensor(torch.Tensor):
    """`data * scale`, computed on use."""

    inner: Tensor
    scale: Tensor
    recipe: Any

    @staticmethod
    def __new__(cls, data: Tensor, scale: Tensor, recipe: Any) -> ScaledTensor:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=scale.dtype, device=data.device)  # type: ignore[attr-defined, no-any-return]

    def __init__(self, data: Tensor, scale: Tensor, recipe: Any) -> None:
        self.inner, self.scale, self.recipe = data, scale, recipe

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner", "scale"], {"recipe": self.recipe, "dtype": self.scale.dtype}

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], context: Any, size: Any, stride: Any) -> ScaledTensor:
        assert context["dtype"] == inner["scale"].dtype and size == inner["inner"].shape
        return cls(inner["inner"], inner["scale"], context["recipe"])

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner, args[0].scale, args[0].recipe)
        plain = tree_map(lambda each: each.inner * each.scale if isinstance(each, cls) else each, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


def scaled(value: float, rounding: Rounding = Rounding.NEAREST) -> ScaledTensor:
    data = torch.arange(6, dtype=torch.int8).view(2, 3)
    return ScaledTensor(data + int(value), torch.full((2, 1), value), Recipe(rounding, (1, 3)))
