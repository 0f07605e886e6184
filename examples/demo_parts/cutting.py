"""The fault of the demo: all connections end once some bytes have passed."""

from aiockpt.testing import Fault
from aiockpt.testing.faults import Pipe


class CutAll(Fault):
    """Cuts each connection that has brought bytes before ``count`` of all passed."""

    def __init__(self, count: int) -> None:
        self.left, self.seen = count, set[Pipe]()

    async def forward(self, pipe: Pipe, data: bytes, at: int) -> None:
        if self.left > 0:
            self.left -= len(data)
            self.seen.add(pipe)
        elif pipe in self.seen:
            pipe.cut(reset=True)
        await pipe.send(data)
