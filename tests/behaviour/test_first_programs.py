"""The programs that users write first work as they are written."""

from __future__ import annotations

import asyncio
import inspect
from dataclasses import fields
from typing import Any

import pytest
import torch

import aiockpt
from aiockpt.testing import assert_same
from tests.support.groups import transports

STATE = {"model.head": torch.ones(3), "model.body": torch.zeros(4)}


def local() -> aiockpt.HTTPTransport[Any]:
    """Return a transport that others cannot reach."""
    return aiockpt.HTTPTransport(server=aiockpt.Server(host="127.0.0.1"))


@pytest.mark.asyncio
async def test_a_send_and_a_receive_need_no_ranks() -> None:
    """Keywords suffice, and torchft's order of arguments works."""
    async with local() as sender, local() as receiver:
        await sender.send_checkpoint(step=100, state_dict=STATE)
        metadata = sender.metadata()
        assert_same(await receiver.recv_checkpoint(metadata=metadata, step=100), STATE)
        assert_same(await receiver.recv_checkpoint(metadata=metadata), STATE)
        several = [metadata, metadata]
        found = await receiver.recv_checkpoint(metadata=several, step=100)
        assert_same(found, STATE)
        template = {name: torch.full_like(value, 7) for name, value in STATE.items()}
        await sender.send_checkpoint([1], 101, STATE, 30)
        await receiver.recv_checkpoint(
            metadata=metadata, step=101, into=template, have=True
        )
        assert_same(template, STATE)
        head = await receiver.recv_checkpoint(0, metadata, 101, select=["model.head"])
        assert set(head) == {"model.head"}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("call", "missing"),
    [
        (lambda t: t.send_checkpoint([1]), "step"),
        (lambda t: t.send_checkpoint(step=1), "state_dict"),
        (lambda t: t.send_checkpoint(state_dict=STATE), "step"),
        (lambda t: t.recv_checkpoint(step=1), "metadata"),
    ],
)
async def test_what_is_left_out_is_named(call: Any, missing: str) -> None:
    """The error names a missing argument as Python would."""
    async with local() as transport:
        with pytest.raises(TypeError, match=f"needs {missing}="):
            await call(transport)


@pytest.mark.asyncio
async def test_a_group_has_the_same_verbs() -> None:
    """By default a send goes to all other ranks, and a receive comes from rank 0."""
    async with transports(3) as (sender, *receivers):
        _, *found = await asyncio.gather(
            sender.send_checkpoint(step=100, state_dict=STATE),
            *(each.recv_checkpoint(step=100) for each in receivers),
        )
        for state in found:
            assert_same(state, STATE)
        with pytest.raises(TypeError, match="needs state_dict="):
            await sender.send_checkpoint(step=1)
        with pytest.raises(TypeError, match="needs step="):
            await receivers[0].recv_checkpoint()


@pytest.mark.asyncio
async def test_a_group_that_does_not_know_this_rank() -> None:
    """The error asks for ranks, since torchft's groups do not know the others."""

    class Nameless:
        def size(self) -> int:
            return 2

        def send(self, *_: object) -> Any:
            raise AssertionError

        recv = send

    async with aiockpt.PGTransport[Any](Nameless()) as transport:
        with pytest.raises(ValueError, match="pass dst_ranks="):
            await transport.send_checkpoint(step=1, state_dict=STATE)


def test_the_options_fit_on_a_screen() -> None:
    """Each call has at most a dozen arguments, and each record a dozen fields."""
    assert len(inspect.signature(aiockpt.HTTPTransport).parameters) <= 12
    for record in (aiockpt.Server, aiockpt.Auth, aiockpt.Receive):
        assert len(fields(record)) <= 12


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (aiockpt.HTTPTransport, {"server": "process"}, "server must be of type Server"),
        *(
            (
                aiockpt.HTTPTransport,
                {"auth": wrong},
                f"auth must be of type Auth, got {t}",
            )
            for wrong, t in (("open-sesame", "str"), ({"token": "open-sesame"}, "dict"))
        ),
        *(
            (aiockpt.Auth, {"token": wrong}, f"token must be of type str, got {t}")
            for wrong, t in ((False, "bool"), (0, "int"), (b"open-sesame", "bytes"))
        ),
    ],
)
def test_an_option_of_another_type(make, options, reason: str) -> None:
    """The message names the type, and no secret."""
    with pytest.raises(TypeError, match=reason) as caught:
        make(**options)
    assert "sesame" not in str(caught.value)


def test_a_record_does_not_show_the_token() -> None:
    """Whoever logs the options logs no secret."""
    auth = aiockpt.Auth(token="open-sesame", manifest_key="k" * 16)
    assert "sesame" not in f"{auth} {auth!r} {auth.token!r}"
    assert "kkk" not in repr(auth)
