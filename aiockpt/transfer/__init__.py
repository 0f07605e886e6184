"""Staging, destinations, and what a receive is made of."""

from __future__ import annotations
