"""Every exception says what happened, keeps its facts, and is what the docs call it."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

from aiockpt import errors
from aiockpt.errors import AiockptError

CLASSES = {name: getattr(errors, name) for name in errors.__all__}
URL = "http://peer:1"

SAMPLES: list[tuple[AiockptError, str]] = [
    (AiockptError("why"), "why"),
    (errors.TransportError("why"), "why"),
    (
        errors.PeerUnreachableError(URL, "refused"),
        f"cannot reach {URL}: refused; is the sender running there?",
    ),
    (
        errors.TransferInterruptedError(URL, received=3, expected=5),
        f"{URL} closed the connection after 3 of 5 bytes of the manifest",
    ),
    (
        errors.TransferInterruptedError(URL, received=3, expected=5, chunk=7),
        f"{URL} closed the connection after 3 of 5 bytes of chunk 7",
    ),
    (
        errors.TransferStalledError(URL, idle=30, chunk=7),
        f"{URL} sent nothing for 30 s in chunk 7",
    ),
    (
        errors.TransferTimeoutError("fetch_chunk", 5),
        "timed out after 5 s while fetching the checkpoint",
    ),
    (
        errors.TransferTimeoutError("stage", 0.25, what="step 3", last_error="full"),
        "timed out after 0.25 s while staging step 3; last error: full",
    ),
    (errors.PeerFailedError(2, "no memory"), "rank 2 gave up: no memory"),
    (errors.PeerFailedError(None, "x", url=URL), f"{URL} gave up: x"),
    (errors.PeerFailedError(None, "x"), "the sender gave up: x"),
    (
        errors.ProcessGroupError("aborted", rank=2),
        "process group operation with rank 2 failed: aborted; make a new group",
    ),
    (errors.UnavailableError("why"), "why"),
    (
        errors.StepNotFoundError(4, serving=3, url=URL),
        f"step 4 is not published at {URL}; being served is step 3",
    ),
    (
        errors.StepNotFoundError(None),
        "no checkpoint published; being served is nothing",
    ),
    (
        errors.CheckpointChangedError(expected="aa", actual="bb", url=URL),
        f"snapshot aa at {URL} is now bb; receive again",
    ),
    (errors.ProtocolError("why"), "why"),
    (errors.LocalProtocolError("why"), "why"),
    (errors.RemoteProtocolError("why"), "why"),
    (
        errors.LimitExceededError("the header", limit=5, actual=6),
        (
            "the header is 6, more than the limit of 5; "
            "raise it in Limits if you trust its source"
        ),
    ),
    (
        errors.IntegrityError(expected="aa", actual="bb"),
        "the header has digest bb, expected aa",
    ),
    (
        errors.IntegrityError(expected="aa", actual="bb", chunk=7, url=URL),
        f"chunk 7 from {URL} has digest bb, expected aa",
    ),
    (
        errors.FingerprintMismatchError({f"w{n}": f"w{n} differs" for n in range(12)}),
        "; ".join(f"w{n} differs" for n in range(10)) + "; and 2 more",
    ),
    (
        errors.AuthenticationError(URL, "expired"),
        (
            f"{URL} refused the token: expired; pass the sender's metadata() whole, "
            "or the same token on both sides"
        ),
    ),
    (
        errors.ForgedManifestError(URL, missing=True),
        (
            f"the manifest of {URL} has no MAC; is it the sender that you mean, "
            "and were both ends given the same manifest_key?"
        ),
    ),
    (errors.StateDictError("why"), "why"),
    (
        errors.UnsupportedLeafError("a.b", "module.Type"),
        (
            "a.b is a module.Type: convert it, or call aiockpt.register_leaf for its "
            "type on both ends"
        ),
    ),
    (errors.UnsupportedLeafError("", "T", "no"), "the state dict is a T: no"),
    (
        errors.TemplateMismatchError("a", expected="one", actual="two"),
        "template a: the checkpoint has one, the template has two",
    ),
    (
        errors.MissingKeysError("p", [*"abcdefghijkl"]),
        "p is missing keys: a, b, c, d, e, f, g, h, i, j and 2 more",
    ),
    (
        errors.DeviceMeshError("a mesh", "no group", path="a"),
        "a: a mesh has no place here: no group",
    ),
    (
        errors.RankValuesError("run/7", ["rng", "data.step"]),
        (
            "run/7: its ranks saved different values at rng, data.step: pass "
            'rank_values=0 for those of rank 0, rank_values="keep" for those of the '
            "template, or leave them out by select="
        ),
    ),
    (errors.StagingError("why"), "why"),
    (errors.StorageError("/a", "full"), "/a: full"),
    (errors.CheckpointNotFoundError("/a", "nothing"), "/a: nothing"),
    (
        errors.WorldSizeMismatchError("/a", saved=1, loading=2),
        (
            "/a: 1 rank wrote it, each its own part, and 2 ranks would load it; "
            "say rank= for one of these parts"
        ),
    ),
    (errors.WorkerError("died", exitcode=9, remote_traceback="..."), "died"),
    (errors.WorkerTimeoutError("late"), "late"),
    (
        errors.SaveInProgressError("/a", under_way=2),
        "/a: 2 saves before it are not written yet",
    ),
    (
        errors.MissingExtraError("uvloop", extra="uvloop"),
        "uvloop is not installed: pip install 'aiockpt[uvloop]'",
    ),
    (errors.ClosedError("the transport"), "the transport is closed; make a new one"),
]


@pytest.mark.parametrize(("error", "message"), SAMPLES, ids=lambda each: None)
def test_a_message_is_made_of_the_facts(error: AiockptError, message: str) -> None:
    """What happened, where, and what to do."""
    assert str(error) == message
    # It crosses processes with its facts, whatever arguments its constructor wants.
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert vars(there) == vars(error)
    assert str(there) == message


def test_every_class_has_a_message_that_is_tested() -> None:
    """Nobody adds an exception without seeing what it says."""
    assert {type(error) for error, _ in SAMPLES} == set(CLASSES.values())


def test_the_docstring_is_the_tree() -> None:
    """Each class stands below its parent, with the builtins that it is as well."""
    parents = [""]
    found = {}
    for line in (errors.__doc__ or "").splitlines():
        match = re.match(r"    ([│├└─ ]*)([A-Z]\w+Error)(?: +(.*))?$", line)
        if match is None:
            continue
        depth, name, remark = len(match[1]) // 4, match[2], match[3] or ""
        also = re.search(r"\((\w+Error(?:, \w+Error)*)\)", remark)
        found[name] = [parents[depth], *(also[1].split(", ") if also else ())]
        parents[depth + 1 :] = [name]
    real = {
        name: [base.__name__ for base in cls.__bases__] for name, cls in CLASSES.items()
    }
    real["AiockptError"] = [""]
    # A builtin that the parent inherits too need not be said twice.
    assert found.keys() == real.keys()
    for name, bases in found.items():
        assert bases[0] == real[name][0], name
        assert set(bases[1:]) <= {each.__name__ for each in CLASSES[name].__mro__}, name
        assert set(real[name][1:]) <= set(bases[1:]) | {"ConnectionError"}, name


@pytest.mark.parametrize("error", [each for each, _ in SAMPLES], ids=lambda each: None)
def test_each_argument_is_a_fact(error: AiockptError) -> None:
    """The reference shows the arguments of a class, and users read them again."""
    facts = inspect.signature(type(error)).parameters.keys()
    assert facts <= vars(error).keys()
