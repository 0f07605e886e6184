"""Each class of the package has a name of its own: a name says which one is meant."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "aiockpt"

ADAPTERS = {"HTTPTransport", "PGTransport"}
"""torchft's users find its own names in `aiockpt.torchft`."""


def homes_of_classes() -> dict[str, list[str]]:
    """Return the modules of each class name, without its underscore."""
    homes = defaultdict(list)
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                homes[node.name.lstrip("_")].append(f"{path.relative_to(PACKAGE)}")
    assert len(homes) > 300
    return homes


def test_each_class_has_a_name_of_its_own() -> None:
    """An underscore makes no other name."""
    homes = homes_of_classes()
    twice = {name: found for name, found in homes.items() if len(found) > 1}
    assert twice.keys() == ADAPTERS, twice
    assert all("torchft/" in " ".join(twice[name]) for name in ADAPTERS)
