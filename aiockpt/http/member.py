"""Several peers that are asked for one checkpoint: who is left, who gave how much."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence

from aiockpt.errors import AiockptError, TransportError
from aiockpt.events import TransferEvent, emit
from aiockpt.http.protocol import Source

__all__ = ["Members"]


class Members:
    """Peers, numbered in the caller's order.

    Attributes:
        deadline: Of the call under way, in loop time.
        agreed: Those that are known to hold what was chosen.
        given: How many verified bytes came from each, in the last fetch.
    """

    def __init__(self, sources: Sequence[Source]) -> None:
        self.sources = sources
        self.begin(math.inf)

    def begin(self, deadline: float) -> None:
        """Forget everything: another manifest is asked for."""
        self.deadline = deadline
        self.agreed: set[int] = set()
        self.given = [0] * len(self.sources)
        self._errors: dict[int, AiockptError] = {}

    def __repr__(self) -> str:
        return f"<Members {len(self.left())} of {len(self.sources)}>"

    def __len__(self) -> int:
        return len(self.sources)

    @property
    def name(self) -> str:
        """All addresses, without tokens."""
        return " ".join(source.base_url for source in self.sources)

    def left(self) -> list[int]:
        """Return those that were not dropped."""
        return [n for n in range(len(self.sources)) if n not in self._errors]

    def has(self, number: int) -> bool:
        """Say whether one was not dropped."""
        return number not in self._errors

    def drop(self, number: int, error: AiockptError, *, step: int) -> None:
        """Use a member no more; only the first error that says why counts."""
        if number in self._errors:
            return
        self._errors[number] = error
        emit(
            TransferEvent(
                stop="drop",
                step=step,
                peer=self.sources[number].base_url,
                nbytes=self.given[number],
                detail=str(error),
                level=logging.WARNING,
            )
        )

    def verdict(self) -> AiockptError:
        """Return the error that says why nobody is left; the others are its notes.

        What a peer said tells more than that another one said nothing.
        """
        return summed_up(self.sources, self._errors)

    def report(self, step: int, seconds: float) -> None:
        """Tell who gave how much."""
        for source, nbytes in zip(self.sources, self.given, strict=True):
            emit(
                TransferEvent(
                    stop="fetch_chunk",
                    step=step,
                    peer=source.base_url,
                    nbytes=nbytes,
                    seconds=seconds,
                    level=logging.INFO,
                )
            )


def summed_up(
    sources: Sequence[Source], errors: dict[int, AiockptError]
) -> AiockptError:
    """Return one of the errors of all sources, with the others as its notes."""
    numbers = sorted(errors)
    told = [n for n in numbers if not isinstance(errors[n], TransportError)]
    chosen = (told or numbers)[0]
    for number in numbers:
        if number != chosen:
            url, error = sources[number].base_url, errors[number]
            errors[chosen].add_note(f"{url} failed, too: {error}")
    return errors[chosen]
