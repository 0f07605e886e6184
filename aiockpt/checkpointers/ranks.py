"""Which ranks save together, where they meet by default, and what they exchange.

`RankLookup` finds out, at each save and load, which rank this process is. Several ranks
meet in the store of torch.distributed's default group, unless `BarrierConfig` gives the
address of another one.

Nothing here loads ``torch.distributed``: a program that has a group has loaded it.
"""

from __future__ import annotations

import logging
import os
import secrets
import sys
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from aiockpt.checkpointers.config import BarrierConfig, GroupStore, RankInfo, SaveRanks

if TYPE_CHECKING:
    from torch._C._distributed_c10d import ProcessGroup, Store

logger = logging.getLogger("aiockpt")

ALONE: Final = "rank_info=RankInfo(0, 1)"
"""How a program says that one process saves for all ranks."""


class RankLookup:
    """Finds out the ranks of a checkpointer, again at each save and load.

    Args:
        given: This process's rank, if the caller has given one.
        config: How the ranks meet. None: a writer of the caller's own knows it.
    """

    def __init__(self, given: RankInfo | None, config: BarrierConfig | None) -> None:
        self._given, self._config = given, config
        self._warned = False

    def info(self) -> RankInfo:
        """Return this process's rank as it is now."""
        return self._given or default_rank_info()

    def at_start(self) -> SaveRanks | None:
        """Return the ranks as they are now; None if they have nowhere to meet yet."""
        with suppress(ValueError):
            return self._found(self.info())
        return None

    def of_save(self) -> SaveRanks:
        """Return the ranks of a save that begins now.

        Raises:
            ValueError: there are several ranks, and nowhere to meet.
        """
        info = self.info()
        if self._given is None and not is_initialized():
            self._warn_if_alone()
        return self._found(info)

    def _found(self, info: RankInfo) -> SaveRanks:
        alone = info.global_world_size == 1
        if alone or self._config is None or self._config.names_store:
            return SaveRanks(info)
        return SaveRanks(info, default_store(info.global_world_size))

    def _warn_if_alone(self) -> None:
        launched = os.environ.get("WORLD_SIZE", "")
        if self._warned or not launched.isdecimal() or int(launched) < 2:
            return
        self._warned = True
        logger.warning(
            "this process saves as the only rank, although WORLD_SIZE is %s: call "
            "torch.distributed.init_process_group before the first save, or give "
            "rank_info; %s says that this process saves for all",
            launched,
            ALONE,
        )


def default_rank_info() -> RankInfo:
    """Return this process's rank in torch's default process group, or 0 of 1."""
    if not is_initialized():
        return RankInfo(0, 1)
    distributed = sys.modules["torch.distributed"]
    return RankInfo(distributed.get_rank(), distributed.get_world_size())


def is_initialized() -> bool:
    """Say whether this process has a default process group."""
    # If the program has initialized it, the program has imported it.
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available():
        return False
    return bool(distributed.is_initialized())


def default_store(world_size: int) -> GroupStore:
    """Return the default group's store.

    Raises:
        ValueError: there is no such group, or its store has no address.
    """
    remedy = (
        "give the address of a TCP store by BarrierConfig('tcp_store', "
        "{'master_address': ..., 'tcpstore_port': ...}); if only one process saves, "
        f"give it {ALONE}"
    )
    if not is_initialized():
        raise ValueError(
            f"{world_size} ranks need somewhere to meet: initialize torch.distributed "
            f"before the save, or {remedy}"
        )
    from torch import distributed as dist

    given = dist.distributed_c10d._get_default_store()  # noqa: SLF001 - no other way
    store = given
    while isinstance(store, dist.PrefixStore):  # type: ignore[attr-defined]
        store = store.underlying_store
    if not isinstance(store, dist.TCPStore):  # type: ignore[attr-defined]
        raise ValueError(
            f"{world_size} ranks cannot meet in the {type(store).__name__} with which "
            "torch.distributed was initialized: initialize it by env:// or tcp://, or "
            f"{remedy}"
        )
    return GroupStore(store.host, store.port, _group_of(given))


_groups: Final[weakref.WeakKeyDictionary[Store, str]] = weakref.WeakKeyDictionary()


def _group_of(store: Store) -> str:
    """Return the name of the group, on which its ranks agree in its store.

    The group's own prefix, which is not known, keeps the name from other groups. If
    the store has failed, the meeting fails, too, and says so.
    """
    if store not in _groups:
        try:
            said = store.compare_set("aiockpt/group", "", secrets.token_hex(8))
        except RuntimeError:
            return ""
        _groups[store] = said.decode()
    return _groups[store]


def gathered(mine: bytes, group: ProcessGroup) -> list[bytes]:
    """Return the bytes of all ranks of a group, each of which must call this.

    Raises:
        ValueError: this process is not in the group.
    """
    from torch import distributed as dist

    size = dist.get_world_size(group)
    if size < 1:
        raise ValueError("this process is no rank of the group")
    found: list[Any] = [None] * size
    dist.all_gather_object(found, mine, group=group)
    return found
