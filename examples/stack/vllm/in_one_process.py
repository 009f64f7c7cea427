"""vLLM in this process reads versions of a model from the store; its greedy tokens beside transformers'.

Runs in an interpreter that has vLLM: `make vllm-newest`.
"""

from __future__ import annotations

import os
import tempfile

from holdfast.rl.generators.vllm.vllm_generator import ENVIRONMENT, ON_CPU

os.environ.update(ENVIRONMENT | ON_CPU | {"OMP_NUM_THREADS": "1"})

import torch
import vllm
from transformers import AutoConfig, AutoModelForCausalLM
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

from holdfast.store import WeightStore

VERSIONS, TOKENS = 6, 20
PROMPTS = [[first, first + 1, first + 2] for first in range(16)]


@torch.no_grad()
def greedy(model: torch.nn.Module) -> list[list[int]]:
    """What transformers says is likeliest, token by token."""
    tokens = torch.tensor(PROMPTS)
    for _ in range(TOKENS):
        tokens = torch.cat([tokens, model(input_ids=tokens).logits[:, -1].argmax(-1, keepdim=True)], 1)
    return [list(each) for each in tokens[:, len(PROMPTS[0]) :].tolist()]


def main() -> None:
    """Print what was seen; the exit status is 1 if tokens differ."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=128,
        initializer_range=0.2,
        architectures=["LlamaForCausalLM"],
    )
    model = AutoModelForCausalLM.from_config(config)
    equal = []
    with tempfile.TemporaryDirectory() as folder, WeightStore(f"sqlite://{folder}/weights.sqlite", replicas=1) as store:
        config.save_pretrained(folder)
        llm = vllm.LLM(
            model=folder,
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_num_seqs=len(PROMPTS),
            kv_cache_memory_bytes=1 << 26,
            enable_prefix_caching=False,
            weight_transfer_config=WeightTransferConfig(backend="holdfast"),
        )
        llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info={"url": store.url}))
        asked = [{"prompt_token_ids": each} for each in PROMPTS]
        how = vllm.SamplingParams(max_tokens=TOKENS, temperature=0.0, detokenize=False, ignore_eos=True)
        for version in range(VERSIONS):
            with torch.no_grad():
                for each in model.parameters():
                    each.add_(torch.randn_like(each) * 0.02)
            store.publish(version, model.state_dict())
            llm.start_weight_update()
            llm.update_weights(WeightTransferUpdateRequest(update_info={"version": version, "timeout": 60.0}))
            llm.finish_weight_update(weight_version=str(version))
            found = [list(each.outputs[0].token_ids) for each in llm.generate(asked, how, use_tqdm=False)]
            equal.append(found == greedy(model))
            print(f"version {version}: tokens equal to transformers': {equal[-1]}", flush=True)
    os._exit(not all(equal))


if __name__ == "__main__":
    main()
