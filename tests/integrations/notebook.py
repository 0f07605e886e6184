"""The cells of a notebook: each function's body is one cell."""

# A cell has the names of the cells before it.
# ruff: noqa: B007, F821, F841
# mypy: ignore-errors


async def publish() -> None:
    import torch

    import aiockpt

    model = torch.nn.Linear(64, 64)
    transport = aiockpt.HTTPTransport()
    await transport.send_checkpoint(step=1, state_dict=model.state_dict())
    metadata = transport.metadata()


async def receive() -> None:
    async with aiockpt.HTTPTransport() as receiver:
        state = await receiver.recv_checkpoint(metadata=metadata, step=1)


async def end() -> None:
    await transport.shutdown()


def publish_in_the_background() -> None:
    transport = aiockpt.make_background_transport()
    transport.send_checkpoint(step=2, state_dict=model.state_dict())
    metadata = transport.metadata()


def follow() -> None:
    with aiockpt.make_background_transport() as receiver:
        for step, state in receiver.follow(metadata):
            break
    assert step == 2
    assert torch.equal(state["weight"], model.weight)


def save() -> None:
    with aiockpt.make_background_checkpointer() as checkpointer:
        assert checkpointer.save(model.state_dict(), "run/step-2").result()
    assert torch.equal(aiockpt.load("run/step-2")["weight"], model.weight)
    transport.shutdown()
