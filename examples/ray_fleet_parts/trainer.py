"""A trainer that refreshes engines, which are Ray actors, after some steps."""

import time
from contextlib import suppress
from typing import Any

import torch
from ray.exceptions import ActorUnavailableError
from ray.util import get_node_ip_address
from transformers import LlamaConfig, LlamaForCausalLM
from vllm.distributed.weight_transfer.base import ModuleSource
from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient

from aiockpt import Server
from aiockpt.vllm import TrainerEngine, TrainerInitInfo

SHAPE = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 1}


class Trainer:
    """It teaches a small Llama to count modulo 32."""

    def __init__(self, place: str) -> None:
        self.model = LlamaForCausalLM(LlamaConfig(vocab_size=32, **SHAPE))
        self.model.save_pretrained(place)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 3e-3)
        self.sender = TrainerEngine.trainer_init(
            TrainerInitInfo(rank=0, server=Server(host=get_node_ip_address())),
            client=RayVLLMWeightSyncClient([]),
            source=ModuleSource(self.model),
        )

    def metadata(self) -> str:
        return self.sender.metadata

    def train(self, engines: list[Any]) -> str:
        for _ in range(10):
            tokens = (torch.randint(32, (16, 1)) + torch.arange(16)) % 32
            loss = self.model(tokens, labels=tokens).loss
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
        self.sender.client = RayVLLMWeightSyncClient(engines)
        for _ in range(60):
            with suppress(ActorUnavailableError):
                self.sender.send_weights()
                return f"version {self.sender.version} has a loss of {loss:.2f}"
            time.sleep(1)  # Ray is restarting an engine
        raise TimeoutError("an engine has not come back")
