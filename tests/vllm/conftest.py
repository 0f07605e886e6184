"""A tiny random Llama, and vLLM engines of it on the CPU."""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from weakref import WeakSet

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
}

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from transformers import LlamaConfig, LlamaForCausalLM

CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=256,
    tie_word_embeddings=False,
    dtype="bfloat16",
    architectures=["LlamaForCausalLM"],
)


class Model:
    """The trainer's model, with a source of its weights."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.module = LlamaForCausalLM(CONFIG).to(torch.bfloat16)

    def step(self, seed: int) -> None:
        """Change a part of every weight; of shards, what this rank has of it."""
        noise = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for each in self.module.parameters():
                chosen = torch.rand(each.shape, generator=noise) < 0.1
                change = chosen * torch.randn(each.shape, generator=noise)
                if isinstance(each, DTensor):
                    mesh = each.device_mesh
                    part = change.chunk(mesh.size())[mesh.get_local_rank()]
                    each.to_local().add_(part, alpha=0.1)
                else:
                    each.add_(change, alpha=0.1)

    def save(self, place: Path) -> Path:
        """Write what vLLM loads a model from."""
        place.mkdir(exist_ok=True)
        (place / "config.json").write_text(json.dumps(CONFIG.to_dict()))
        state = {
            name: each.contiguous() for name, each in self.module.state_dict().items()
        }
        save_file(state, place / "model.safetensors")
        return place


Engine = Any
Make = Callable[[Path], Engine]


def prompts() -> list[dict[str, list[int]]]:
    """Return what is generated from."""
    return [{"prompt_token_ids": [1, 2, 3]}, {"prompt_token_ids": [7, 9, 30, 200]}]


def answers(engine: Engine) -> list[list[int]]:
    """Return the tokens that an engine generates."""
    from vllm import SamplingParams

    greedy = SamplingParams(temperature=0, max_tokens=12, detokenize=False)
    found = engine.generate(prompts(), greedy, use_tqdm=False)
    return [list(each.outputs[0].token_ids) for each in found]


def checksums(engine: Engine) -> Any:
    """Return the SHA-256 of each parameter."""
    return engine.collective_rpc("compute_weight_checksums")


@pytest.fixture
def model() -> Model:
    """Make a trainer's model."""
    return Model()


@pytest.fixture
def make() -> Iterator[Make]:
    """Make engines that can be updated."""
    from vllm import LLM
    from vllm.config import WeightTransferConfig

    made = WeakSet[Engine]()

    def make_one(place: Path) -> Engine:
        engine = LLM(
            str(place),
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=128,
            weight_transfer_config=WeightTransferConfig(backend="aiockpt"),
        )
        made.add(engine)
        return engine

    yield make_one
    for each in made:
        each.collective_rpc("shutdown_weight_transfer_engine")
    gc.collect()
