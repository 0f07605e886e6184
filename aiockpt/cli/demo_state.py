"""The demo's training state, and fingerprints that owe nothing to the wire format."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch

from aiockpt.errors import StateDictError
from aiockpt.format.limits import FILE_LIMITS
from aiockpt.memory.arena import view_of_address
from aiockpt.storage.statefile import read_state_file

__all__ = ["STEP", "fingerprints", "training_state"]

STEP = 1
_TRAINABLE = {torch.float16, torch.bfloat16, torch.float32, torch.float64}


def training_state(path: Path) -> dict[str, object]:
    """Return what a training loop saves after its first step on a model file.

    Raises:
        StorageError: the file cannot be read.
        StateDictError: it does not hold the parameters of a module.
    """
    model = _module(read_state_file(path, limits=FILE_LIMITS).state)
    # Fused: one pass over the memory, where the default makes temporaries of it all.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100)
    loss = sum(each.norm() for each in model.parameters())
    assert isinstance(loss, torch.Tensor)
    loss.backward()  # type: ignore[no-untyped-call]  # torch's own
    optimizer.step()
    scheduler.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scheduler": scheduler.state_dict(),
        "rng": _rng_states(),
        "step": STEP,
    }


def _module(tensors: object) -> torch.nn.Module:
    """Return nested modules whose state dict has these names."""
    root = torch.nn.Module()
    if not isinstance(tensors, Mapping):
        raise StateDictError("the model file does not hold a dict of tensors")
    for name, tensor in tensors.items():
        try:
            _attach(root, str(name).split("."), tensor)
        except (KeyError, TypeError, AttributeError) as error:
            raise StateDictError(f"{name} is no parameter of a module") from error
    if not list(root.parameters()):
        raise StateDictError("the model file holds nothing that can be trained")
    return root


def _attach(module: torch.nn.Module, names: list[str], tensor: torch.Tensor) -> None:
    *parents, leaf = names
    for name in parents:
        if name not in dict(module.named_children()):
            module.add_module(name, torch.nn.Module())
        module = module.get_submodule(name)
    if tensor.dtype in _TRAINABLE:
        module.register_parameter(leaf, torch.nn.Parameter(tensor.detach()))
    else:
        module.register_buffer(leaf, tensor)


def _rng_states() -> dict[str, object]:
    states: dict[str, object] = {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
    }
    if find_spec("numpy") is not None:
        import numpy as np

        states["numpy"] = np.random.get_state()
    return states


def fingerprints(value: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Give path and SHA-256 of every leaf; type, order and bytes all count."""
    kind = type(value).__name__
    if isinstance(value, Mapping):
        yield path, _hash(kind, repr(list(value)).encode())
        for key, child in [*value.items(), *vars_of(value)]:
            yield from fingerprints(child, f"{path}.{key}")
    elif isinstance(value, (list, tuple)):
        yield path, _hash(kind, str(len(value)).encode())
        for index, child in enumerate(value):
            yield from fingerprints(child, f"{path}[{index}]")
    elif isinstance(value, torch.Tensor):
        dense = value.detach().contiguous()
        facts = f"{kind} {dense.dtype} {tuple(dense.shape)}"
        view = view_of_address(dense.data_ptr(), dense.nbytes, dense)
        yield path, _hash(facts, view)
    else:
        yield path, _hash(kind, repr(value).encode())


def vars_of(value: object) -> list[tuple[str, object]]:
    """Return the attributes that torch hangs on the state dict of a module."""
    return list(getattr(value, "__dict__", {}).items())


def _hash(facts: str, data: bytes | memoryview) -> str:
    state = hashlib.sha256(facts.encode())
    state.update(data)
    return state.hexdigest()
