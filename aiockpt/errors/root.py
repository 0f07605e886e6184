"""The root of the tree, which lets an exception cross process boundaries."""

from __future__ import annotations

from typing import Any

__all__ = ["AiockptError"]


def _revive(cls: type[AiockptError], facts: dict[str, Any]) -> AiockptError:
    error = cls.__new__(cls)
    error.__dict__.update(facts)
    return error


class AiockptError(Exception):
    """Root of everything that the package raises on purpose."""

    def __init__(self, detail: str = "") -> None:
        super().__init__(detail)
        self.detail = detail

    def __str__(self) -> str:
        return self.detail

    def __reduce__(self) -> tuple[Any, ...]:
        # Facts cross process boundaries whole, whatever __init__ requires.
        return (_revive, (type(self), self.__dict__.copy()))
