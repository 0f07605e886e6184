"""Each promise has a test."""

from __future__ import annotations

import re
from functools import reduce
from importlib import import_module

from tests.support.proofs import promises, proofs, render


def test_every_promise_has_a_proof_and_every_proof_a_promise() -> None:
    """Ten invariants, the threat model and the matrix of faults are covered."""
    assert set(proofs()) == set(promises())
    assert len(re.findall(r"^\| .+ \| .+ \| `.+` \|$", render(), re.MULTILINE)) == len(
        promises()
    )


def test_every_proof_is_a_test() -> None:
    """A class that inherits its tests has the one that its mark names."""
    for test in {test for tests in proofs().values() for test in tests}:
        file, *names = test.split("::")
        assert names[-1].startswith(("test_", "Test")), test
        if file.startswith("suites/"):  # only classes there inherit tests
            module = import_module("tests." + file[:-3].replace("/", "."))
            assert callable(reduce(getattr, names, module)), test
