"""The launch order of operations on the GPU: each rank launches them in the order in which its program starts them.

NCCL requires one order on all ranks, also of operations of different communicators. A kernel of NCCL occupies its GPU
until the same operation is launched on the other ranks, and a launch may wait for it on the host. If rank 0 launches A
before B and rank 1 B before A, both may wait forever, with one stream for each communicator too.

Three orders are possible:

    the end of the header exchange    differs between ranks: each rank sees headers when they arrive
    a number from a coordinator       needs one more message between all ranks for each operation
    the start by the program          is the same on all ranks: the queue of a communicator needs that for its own
                                      operations, and ranks in several process sets must call these in one order,
                                      because blocking calls would deadlock otherwise (comm/process_set.py)

So an operation takes its turn when it is started. It is launched when its ranks have agreed and all operations of this
rank that took their turns before are launched or have failed. A turn belongs to the operation, not to the communicator
that moves the bytes: after a join, the subgroup launches an operation in the turn of the communicator that started it.
Ranks that have joined start no operations. The NCCL communicator is created within the turn of its first operation.

The turns cannot deadlock. Of the operations that are not launched on all of their ranks, take the first in the order of
the program. On each of its ranks the turns before it are over. Its header exchange needs only the queue of its own
communicator, and each wait of a rank runs all queues (comm/work.py). So it is launched. Operations with an error, and
those of a communicator that cannot be used any more, give up their turns; the order of the others stays the same.

The price: an operation waits for the header exchanges of operations that were started before it in other communicators.
Operations on host arrays take no turns.
"""

import threading
from collections import deque
from collections.abc import Callable


class LaunchOrder:
    """The launch order of this rank: the turns that are not over, first started first. Threads may share it."""

    def __init__(self) -> None:
        self._turns: deque[LaunchTurn] = deque()
        self._lock = threading.Lock()

    def take(self, is_void: Callable[[], object]) -> "LaunchTurn":
        """Take a turn after all others. is_void: whether the operation cannot be launched any more."""
        turn = LaunchTurn(self, is_void)
        with self._lock:
            self._turns.append(turn)
        return turn

    def first(self) -> "LaunchTurn | None":
        """Return the turn of the operation that may be launched now."""
        with self._lock:
            while self._turns and (self._turns[0].is_over or self._turns[0].is_void()):
                self._turns.popleft()
            return self._turns[0] if self._turns else None


class LaunchTurn:
    """The turn of one operation."""

    def __init__(self, order: LaunchOrder, is_void: Callable[[], object]) -> None:
        self._order, self.is_void, self.is_over = order, is_void, False

    def is_first(self) -> bool:
        """Whether the operation may be launched now."""
        return self._order.first() is self

    def end(self) -> None:
        """The operation is launched, or has failed."""
        self.is_over = True
