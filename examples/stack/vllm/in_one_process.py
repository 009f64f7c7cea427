"""vLLM in this process reads versions of a model from the store; its greedy tokens beside transformers'.

Runs in an interpreter that has vLLM: `make vllm-newest`. The model is that of `update_under_load.py`.
"""

import os
import tempfile

from holdfast.rl.generators.vllm.vllm_generator import ENVIRONMENT, ON_CPU

os.environ.update(ENVIRONMENT | ON_CPU | {"OMP_NUM_THREADS": "1"})

import vllm
from update_under_load import PROMPTS, SOURCE, TOKENS, change, greedy
from vllm.config import WeightTransferConfig
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest

from holdfast.store import WeightStore

VERSIONS = 6


def main() -> None:
    """Print what was seen; the exit status is 1 if tokens differ."""
    model = SOURCE.build()
    equal = []
    with tempfile.TemporaryDirectory() as folder, WeightStore(f"sqlite://{folder}/weights.sqlite", replicas=1) as store:
        model.config.architectures = ["LlamaForCausalLM"]
        model.config.save_pretrained(folder)
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
        asked = [{"prompt_token_ids": [*each]} for each in PROMPTS]
        how = vllm.SamplingParams(max_tokens=TOKENS, temperature=0.0, detokenize=False, ignore_eos=True)
        for version in range(VERSIONS):
            change(model, version)
            store.publish(version, model.state_dict())
            llm.start_weight_update()
            llm.update_weights(WeightTransferUpdateRequest(update_info={"version": version, "timeout": 60.0}))
            llm.finish_weight_update(weight_version=str(version))
            found = [tuple(each.outputs[0].token_ids) for each in llm.generate(asked, how, use_tqdm=False)]
            equal.append(found == greedy(model))
            print(f"version {version}: tokens equal to transformers': {equal[-1]}", flush=True)
    os._exit(not all(equal))


if __name__ == "__main__":
    main()
