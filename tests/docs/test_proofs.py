"""The page of proofs is what the marks say, and each promise has a test."""

from __future__ import annotations

import pytest

from tests.support.proofs import PAGE, promises, proofs, render

pytestmark = pytest.mark.torch_free


def test_the_page_is_up_to_date() -> None:
    """Run `python -m tests.support.proofs` after a change of a mark or a promise."""
    assert PAGE.read_text() == render()


def test_every_promise_has_a_proof_and_every_proof_a_promise() -> None:
    """Ten invariants, the threat model and the matrix of faults are covered."""
    assert set(proofs()) == set(promises())
