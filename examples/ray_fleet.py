"""A trainer and two vLLM engines on Ray, which restarts the engine that is killed."""

import tempfile

import ray
from ray_fleet_parts.engine import Engine  # type: ignore[import-not-found]
from ray_fleet_parts.trainer import Trainer  # type: ignore[import-not-found]

# An engine runs in the process of its actor, and takes a GiB for its cache.
ENV = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}


def main() -> None:
    ray.init(num_cpus=4, log_to_driver=False, runtime_env={"env_vars": ENV})
    with tempfile.TemporaryDirectory() as place:
        trainer = ray.remote(Trainer).remote(place)
        metadata = ray.get(trainer.metadata.remote())  # all that an engine needs
        remote = ray.remote(max_restarts=3)(Engine)
        engines = [remote.remote(place, metadata) for _ in range(2)]
        for killed in (False, False, True):
            training = trainer.train.remote(engines)
            if killed:
                ray.kill(engines[1], no_restart=False)
                print("engine 2 was killed")
            print(ray.get(training))
            answers = ray.get([each.answer.remote() for each in engines])
            for number, (version, tokens) in enumerate(answers, start=1):
                print(f"engine {number} answers with version {version}: {tokens}")
            assert answers[0] == answers[1]


if __name__ == "__main__":
    main()
