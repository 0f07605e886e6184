"""A vLLM engine that loads the newest step of a trainer when Ray restarts it."""

import asyncio
from contextlib import suppress

import ray
from vllm import LLM, SamplingParams
from vllm.config import WeightTransferConfig

from aiockpt import HTTPTransport, StepNotFoundError


class Engine(LLM):  # type: ignore[misc]
    """It has the methods that vLLM's Ray client calls."""

    def __init__(self, place: str, metadata: str) -> None:
        config = WeightTransferConfig(backend="aiockpt")
        how = {"enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 32}
        super().__init__(place, weight_transfer_config=config, **how)
        self.init_weight_transfer_engine({"init_info": {"metadata": metadata}})
        if ray.get_runtime_context().was_current_actor_reconstructed:
            self.catch_up(metadata)

    def catch_up(self, metadata: str) -> None:
        while self.get_weight_version() == "default":
            step = asyncio.run(newest(metadata))
            with suppress(StepNotFoundError):  # a newer one has replaced it
                self.start_weight_update()
                self.update_weights({"update_info": {"step": step}})
                self.finish_weight_update(str(step))

    def answer(self) -> tuple[str, list[int]]:
        greedy = SamplingParams(temperature=0, max_tokens=8, detokenize=False)
        [found] = self.generate({"prompt_token_ids": [3, 4, 5]}, greedy, use_tqdm=False)
        return self.get_weight_version(), list(found.outputs[0].token_ids)


async def newest(metadata: str) -> int:
    async with HTTPTransport() as transport:
        return await anext(transport.steps(metadata))
