"""Checks of what a caller passes, at the moment when it is passed."""

from __future__ import annotations

__all__ = ["require", "require_type"]


def require(*, at_least: float = 0, **options: float) -> None:
    """Raise ``ValueError`` that names the first option below ``at_least``.

    A number that is not one (nan) is below everything.
    """
    for name, value in options.items():
        if not value >= at_least:
            raise ValueError(f"{name} must be at least {at_least:g}, got {value!r}")


def require_type(kind: type[object], **options: object) -> None:
    """Raise ``TypeError`` that names the first option that is no ``kind``."""
    for name, value in options.items():
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__}, got {value!r}")
