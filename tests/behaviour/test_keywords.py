"""No option vanishes: a keyword is used, passed on to who takes it, or refused."""

from __future__ import annotations

import inspect
from typing import Any, cast

import pytest
import torch

import aiockpt
from aiockpt import TransferEvent, add_hook
from aiockpt.checkpointers import (
    AsyncCheckpointer,
    CheckpointProcess,
    CheckpointReader,
    CheckpointWriter,
    CheckpointWriterConfig,
    DefaultStager,
    RankInfo,
    SyncCheckpointer,
    WriterHook,
)

ALONE = RankInfo(0, 1)
IN_A_THREAD = aiockpt.CheckpointerConfig(use_process=False)


def words(**given: Any) -> dict[str, Any]:
    """Return keywords as a type checker accepts them, wherever they go."""
    return given


@pytest.fixture
def saved(tmp_path):
    """Return the path of a checkpoint."""
    path = tmp_path / "step-1"
    with aiockpt.make_sync_checkpointer() as checkpointer:
        checkpointer.save({"w": torch.ones(2), "n": 1}, path)
    return path


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("selekt", "select"),
        ("template", "into"),
        ("inot", "into"),
        ("strickt", "strict"),
        ("device", "map_location"),
        ("map_locatoin", "map_location"),
    ],
)
@pytest.mark.asyncio
async def test_a_load_names_the_nearest_option(saved, name, nearest) -> None:
    """A misspelled or guessed keyword of any load is refused before it reads."""
    calls = [
        lambda **k: aiockpt.load(saved, **k),
        lambda **k: CheckpointReader(ALONE).read(saved, **k),
    ]
    with (
        aiockpt.make_sync_checkpointer() as sync,
        aiockpt.make_background_checkpointer(IN_A_THREAD) as background,
    ):
        calls += [
            lambda **k: sync.load(saved, **k),
            lambda **k: background.load(saved, **k),
        ]
        for call in calls:
            with pytest.raises(TypeError, match=f"no option '{name}'.*{nearest}'"):
                call(**{name: None})
    async with aiockpt.make_async_checkpointer(IN_A_THREAD) as checkpointer:
        with pytest.raises(TypeError, match=f"no option '{name}'.*{nearest}'"):
            await checkpointer.load(saved, **words(**{name: None}))


async def done(made):
    """Return what a call returned, or what it promised."""
    return await made if inspect.isawaitable(made) else made


@pytest.mark.asyncio
async def test_into_is_the_template_everywhere(saved) -> None:
    """`into` fills; `state_dict` is another name of it, and both are too many."""

    def template():
        return {"w": torch.zeros(2)}

    async def check(load) -> None:
        for name in ("into", "state_dict"):
            into = template()
            found = await done(load(saved, **{name: into}))
            assert found is into
            assert into["w"].tolist() == [1, 1]
        with pytest.raises(TypeError, match="two names of the template"):
            await done(load(saved, template(), into=template()))

    await check(aiockpt.load)
    await check(lambda *a, **k: CheckpointReader(ALONE).read(*a, **k)[0])
    with aiockpt.make_sync_checkpointer() as sync:
        await check(sync.load)
    with aiockpt.make_background_checkpointer(IN_A_THREAD) as background:
        await check(background.load)
    async with aiockpt.make_async_checkpointer(IN_A_THREAD) as checkpointer:
        await check(checkpointer.load)


@pytest.mark.asyncio
async def test_a_save_names_the_nearest_option(tmp_path) -> None:
    """A save with an unknown keyword, or swapped arguments, writes nothing."""
    state, path = {"a": 1}, tmp_path / "step-1"
    swapped = "save(state_dict, path)"

    async def refused(save) -> None:
        for given, hint in [
            ((state, path), "no option 'stp': did you mean 'step'?"),
            ((path, state), swapped),
            ((str(path), state), swapped),
            ((state, state), "path must be a str or an os.PathLike, got dict"),
            ((state, 7), "path must be a str or an os.PathLike, got int"),
        ]:
            with pytest.raises(TypeError) as caught:
                await done(save(*given, **({"stp": 7} if "stp" in hint else {})))
            assert hint in str(caught.value)

    with aiockpt.make_sync_checkpointer() as sync:
        await refused(sync.save)
    for config in (IN_A_THREAD, aiockpt.CheckpointerConfig()):
        with aiockpt.make_background_checkpointer(config) as background:
            await refused(background.save)
        async with aiockpt.make_async_checkpointer(config) as checkpointer:
            await refused(checkpointer.save)
    with aiockpt.make_background_checkpointer(IN_A_THREAD) as background:
        where = r"writer_config=CheckpointWriterConfig\(keep_last=...\)"
        with pytest.raises(TypeError, match=where):
            background.save(state, path, **words(keep_last=1))
    writer = CheckpointWriter(CheckpointWriterConfig(), ALONE)
    with pytest.raises(TypeError, match="did you mean 'state_dict'"):
        writer.write(path, {}, statedict={})
    writer.close()
    assert not [*tmp_path.iterdir()]


class Epochs(WriterHook):
    """A hook that takes one word."""

    def pre_commit(self, path: str, *, epoch: int = 0, step: int = 0) -> None:  # type: ignore[override]
        assert (epoch, step) == (3, 7)

    def post_commit(self, path: str, *, epoch: int = 0, step: int = 0) -> None:  # type: ignore[override]
        assert (epoch, step) == (3, 7)


class Noting(CheckpointReader):
    """A reader that takes a word, and passes all on."""

    def read(self, path, state_dict=None, **keywords):
        self.seen = keywords.get("shard")
        return super().read(path, state_dict, **keywords)


class Own:
    """A writer that is no subclass."""

    def __init__(self, rank_info: RankInfo) -> None:
        pass

    def write(self, path, state_dict, *, owner: str) -> None:
        assert owner == "me"


class Tagging(DefaultStager):
    """A stager that takes a word."""

    async def stage(self, state_dict, *, tag: str = "", step: int = 0):  # type: ignore[override]
        self.tag = tag
        return await super().stage(state_dict, step=step)


@pytest.mark.parametrize("config", [IN_A_THREAD, aiockpt.CheckpointerConfig()])
def test_a_hook_gets_the_words_that_it_takes(tmp_path, config) -> None:
    """A word that the hook does not take is refused, although there is a hook."""
    given = words(epoch=3, step=7)
    with aiockpt.make_sync_checkpointer(commit_hook=Epochs()) as sync:
        sync.save({"a": 1}, tmp_path / "a", **given)
        with pytest.raises(TypeError, match="no option 'epok'"):
            sync.save({"a": 1}, tmp_path / "b", **words(epok=3))
    with aiockpt.make_background_checkpointer(
        config, commit_hook=Epochs()
    ) as background:
        assert background.save({"a": 1}, tmp_path / "c", **given).result()
        with pytest.raises(TypeError, match="no option 'epok'"):
            background.save({"a": 1}, tmp_path / "d", **words(epok=3))
    assert {each.name for each in aiockpt.list_checkpoints(tmp_path)} == {"a", "c"}


def test_a_reader_of_ones_own_gets_more_words(saved) -> None:
    """It gets the user's keywords, and the reader below it refuses none."""
    reader = Noting(ALONE)
    writer = CheckpointWriter(CheckpointWriterConfig(), ALONE)
    with SyncCheckpointer(writer, reader) as checkpointer:
        assert checkpointer.load(saved, select=["n"], **words(shard=4)) == {"n": 1}
    assert reader.seen == 4


class Plain:
    """A reader that is no subclass."""

    def read(self, path, state_dict=None, **keywords):
        return {"n": 1}, []


@pytest.mark.asyncio
async def test_the_load_of_a_reader_of_ones_own_is_told(saved) -> None:
    """The load emits an event without a count of bytes."""
    told: list[TransferEvent] = []
    remove, plain = add_hook(told.append), cast("Any", Plain())
    try:
        writer = CheckpointWriter(CheckpointWriterConfig(), ALONE)
        with SyncCheckpointer(writer, plain) as sync:
            assert sync.load(saved) == {"n": 1}
            assert sync.statistics().loads.ended == 0
        process = CheckpointProcess(ALONE)
        async with AsyncCheckpointer(DefaultStager(), process, plain) as made:
            assert await made.load(saved) == {"n": 1}
            assert made.statistics().loads.ended == 0
    finally:
        remove()
    expected = [("load", str(saved))] * 2
    assert [(each.stop, each.detail) for each in told] == expected


def test_a_writer_of_ones_own_gets_all_words(tmp_path) -> None:
    """Its maker may be anything, so the background passes every word on."""
    with aiockpt.make_background_checkpointer(
        IN_A_THREAD, checkpoint_writer_init_fn=Own
    ) as background:
        assert background.save(
            {"a": 1}, tmp_path / "step-1", **words(owner="me")
        ).result()


@pytest.mark.asyncio
async def test_a_stager_of_ones_own_gets_its_word(tmp_path) -> None:
    """A word that only the stager takes passes, and another does not."""
    stager = Tagging()
    writer = CheckpointProcess(ALONE)
    async with AsyncCheckpointer(stager, writer, CheckpointReader(ALONE)) as made:
        handle = await made.save({"a": 1}, tmp_path / "step-1", **words(tag="x"))
        assert await handle.written()
        with pytest.raises(TypeError, match="no option 'tg'"):
            await made.save({"a": 1}, tmp_path / "step-2", **words(tg="x"))
    assert stager.tag == "x"


@pytest.mark.asyncio
async def test_a_transport_names_the_nearest_option() -> None:
    """Its verbs do, and the constructor says where an option has gone."""
    async with aiockpt.HTTPTransport() as transport:
        for call, nearest in [
            (lambda: transport.send_checkpoint(**words(stp=1)), "'step'"),
            (lambda: transport.recv_checkpoint(**words(template={})), "'into'"),
            (lambda: transport.recv_checkpoint(**words(metdata="")), "'metadata'"),
            (lambda: transport.prepare("", into={}, **words(selct=[])), "'select'"),
        ]:
            with pytest.raises(TypeError, match=f"did you mean {nearest}"):
                await call()
        with pytest.raises(TypeError, match="did you mean 'prepare'"):
            transport.follow("", **words(prepared=True))
        with pytest.raises(TypeError, match="did you mean 'after'"):
            transport.steps("", **words(aftr=1))
    for name, hint in [
        ("port", r"HTTPTransport\(server=Server\(port=...\)\)"),
        ("token", r"HTTPTransport\(auth=Auth\(token=...\)\)"),
        ("limits", r"HTTPTransport\(receive=Receive\(limits=...\)\)"),
        ("linger", r"HTTPTransport\(swarm=Swarm\(linger=...\)\)"),
        ("num_chunks", r"receive=Receive\(connections=...\)"),
        ("timout", "did you mean 'timeout'"),
        ("nonsense", "its options are timeout, advertise, server"),
    ]:
        with pytest.raises(TypeError, match=f"no option '{name}': .*{hint}"):
            aiockpt.HTTPTransport(**words(**{name: 1}))


def test_help_shows_every_option() -> None:
    """The signatures have the options by name, with their defaults."""
    for function in (
        aiockpt.load,
        aiockpt.SyncCheckpointer.load,
        aiockpt.AsyncCheckpointer.load,
        aiockpt.BackgroundCheckpointer.load,
    ):
        names = {*inspect.signature(function).parameters}
        options = {"into", "strict", "select", "verify", "mmap", "on_bytes", "rank"}
        assert options <= names
