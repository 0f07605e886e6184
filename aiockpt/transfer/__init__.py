"""Staging on the sender, and the receive that all transports share."""

from __future__ import annotations
