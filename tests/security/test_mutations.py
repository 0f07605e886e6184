"""Any change of a good header, tree or field ends in a value or in a typed error."""

from __future__ import annotations

import random
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.mutations import Mutator, parse, receive, small_files, split
from tests.support.proofs import proves

CHANCES = st.randoms(use_true_random=False)


@cache
def mutator() -> Mutator:
    """Return one over all kinds of leaves; hypothesis brings the chance."""
    return Mutator(0, small_files())


@proves("threat E1")
@given(CHANCES)
def test_any_changed_header_is_a_value_or_a_typed_error(chance: random.Random) -> None:
    """`receive` lets out what is none."""
    made = mutator()
    made.random = chance
    receive(*made.file())


@given(CHANCES)
def test_any_changed_field_is_a_value_or_a_typed_error(chance: random.Random) -> None:
    """Ranges, conditions, metadata: whatever stands in a header field."""
    made = mutator()
    made.random = chance
    parse(made.field())


@pytest.mark.parametrize("number", range(5))
def test_the_mutations_start_from_what_is_accepted(number: int) -> None:
    """The same seed makes the same mutations."""
    files = small_files()
    assert receive(*split(files[number])) == "accepted"
    one, two = (Mutator(number, files) for _ in range(2))
    assert [one.file() for _ in range(20)] == [two.file() for _ in range(20)]
