"""A Llama of 84,096 random weights with a tokenizer of single characters, and sums to learn: needs no download."""

import random
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

CHARACTERS = "0123456789+= "


def tokenizer() -> PreTrainedTokenizerFast:
    """A token for each character."""
    vocabulary = {character: number for number, character in enumerate(CHARACTERS)}
    vocabulary |= {"<pad>": len(CHARACTERS), "<eos>": len(CHARACTERS) + 1}
    core = Tokenizer(models.WordLevel(vocabulary, unk_token=" "))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="<pad>", eos_token="<eos>", unk_token=" ", padding_side="left"
    )


def small_llama() -> LlamaForCausalLM:
    """The same weights every time."""
    torch.manual_seed(0)
    end = len(CHARACTERS) + 1
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2}
    tokens = {"vocab_size": end + 1, "pad_token_id": end - 1, "bos_token_id": end, "eos_token_id": end}
    return LlamaForCausalLM(LlamaConfig(**sizes, **tokens, num_key_value_heads=2, max_position_embeddings=32))


def sums(count: int) -> list[dict[str, Any]]:
    """Prompts such as `3+4=`, with the answer `07`."""
    drawn = random.Random(0)
    pairs = [(drawn.randint(0, 9), drawn.randint(0, 9)) for _ in range(count)]
    return [{"prompt": f"{one}+{other}=", "answer": f"{one + other:02d}"} for one, other in pairs]
