"""An atomic counter that all ranks share: how many of them are done, or which item of work is next.

The watcher of the chief's node keeps it (allred/watch/process.py), so a rank gets an answer whatever the others do:
they need not call anything. A call takes about 100 us, and from another node a round trip to the chief's node.
"""

import operator

from allred import world
from allred.errors import AllredError, InputError
from allred.runtime.timings import WORDS_CHARS


class SharedCounter:
    """An atomic counter that starts at 0 in `allred.init()`, and to which any rank adds at any time, like
    MPI_Fetch_and_op.

        items = allred.SharedCounter("items")
        while (item := items.add(1)) < len(work):       # each item goes to one rank
            process(work[item])

        done = allred.SharedCounter("done")             # preemption: stop when most of the others are done
        for step in range(1000):
            act()
            if done.value >= 0.6 * allred.size():
                break
        done.add(1)

    Not collective: no other rank has to take part. name: the same name is the same counter on all ranks.

    Raises InputError for a name that is not a string. `add` and `value` raise NotInitializedError before init().
    """

    def __init__(self, name: str) -> None:
        if not isinstance(name, str) or len(name) > WORDS_CHARS:
            raise InputError(f"SharedCounter({name!r:.80}): the name must be text of at most {WORDS_CHARS} characters")
        self.name = name

    def add(self, number: int) -> int:
        """Add a whole number, and return the value before it: different values for concurrent calls of `add(1)`.

        Raises InputError if it is not an integer, AllredError if the watcher process of this node has ended."""
        who = f"SharedCounter({self.name!r})"
        try:
            number = operator.index(number)
        except TypeError:
            raise InputError(f"{who}.add({number!r}): expected a whole number") from None
        here, watcher = world.current(), world.watcher()
        if here.recovery is not None:
            raise InputError(f"{who} cannot be used with `allred run --elastic`: it would return to 0 with each change")
        if watcher is not None and watcher.is_alive():
            return watcher.count(self.name, number, here.config.timeout_s)
        if here.topology.world_size > 1:
            raise AllredError(
                f"{who} needs the watcher process of this node, which has ended or is off (ALLRED_WATCHER)"
            )
        counts = _OWN.of(here)
        counts[self.name] = counts.get(self.name, 0) + number
        return counts[self.name] - number

    @property
    def value(self) -> int:
        """The value now."""
        return self.add(0)


_OWN = world.Slot(dict[str, int])  # of a world of one rank, which has no watcher
