"""The worker's side of `bench ps`: verify a step of each way, time them in turns, verify all that was done."""

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

import allred
from allred.bench import sets, table, turns, values, ways
from allred.bench.peer import Raw
from allred.bench.verify import WrongResultError
from allred.ps import running
from allred.ps.account import Statistics
from allred.ps.consistency import Policy, Sync
from allred.ps.post import CALL, Post


class Worker:
    """One that trains. workers, comm: mpi4py's communicators, of all of them and of all ranks."""

    def __init__(
        self, name: str, dtype: np.dtype[Any], policy: Policy, workers: Any, comm: Any, raw: Raw | None
    ) -> None:
        self._shapes, self._dtype = sets.SERVED[name](), dtype
        self._workers, self._comm, self._raw = workers, comm, raw
        self._forms = raw.forms if raw else {}
        self._averages = isinstance(policy, Sync)
        self._post = Post(running.current().comm)
        self._opt = allred.distributed(allred.optim.SGD(lr=values.LR), consistency=policy)
        self._params, self._grads = (ways.allocate(self._shapes, dtype) for _ in range(2))
        nbytes = sum(array.nbytes for array in self._params)
        self.what: dict[str, Any] = {"set": name, "bytes": nbytes, "tensors": len(self._shapes)}

    def measure(self, seconds: float) -> list[dict[str, Any]]:
        """The numbers: one record for each way to compare with. Raises WrongResultError on all workers."""
        self._verify_step()
        self._verify_peers()
        start = values.whole_start(self._shapes, self._dtype)
        self._begin(start, values.whole_gradients(self._shapes, self._dtype))
        calls: dict[str, Any] = {"allred": self._step, **{name: form.work for name, form in self._forms.items()}}
        before = self._statistics()
        found = turns.measure(calls, self._workers, seconds * max(1, len(self._forms)), self._rounds)
        after = self._statistics()
        ours = found.pop("allred")
        updates = after.updates - before.updates
        self._verify_all(updates, ours.steps, start)
        each = {
            "updates_per_s": table.short(ours.steps_per_s * updates / (ours.steps * self._workers.Get_size())),
            "staleness": dict(sorted((after.staleness - before.staleness).items())),
        }
        peers = {name: theirs.samples for name, theirs in found.items()}
        nbytes = self.what["bytes"]
        return [
            {**table.numbers(ours.samples, name, peers.get(name or ""), nbytes), **each} for name in peers or [None]
        ]

    def tell(self, problem: str) -> None:
        """Let the servers know why all give up."""
        here = running.current()
        for server in range(here.servers if here.worker == 0 else 0):
            self._post.send(server, CALL, ("give_up", (problem,)))

    def _step(self) -> None:
        self._opt.step(self._params, self._grads)

    def _begin(self, params: list[Any], grads: list[Any]) -> None:
        for targets, sources in ((self._params, params), (self._grads, grads)):
            for target, source in zip(targets, sources, strict=True):
                target[...] = source
        self._opt.broadcast(self._params)

    @contextlib.contextmanager
    def _rounds(self, name: str, calls: int) -> Iterator[None]:
        """For a peer's calls the server leaves its loop. Without a word from it MPI might leave the last one undone."""
        word = np.empty(0, np.uint8)
        if name in self._forms:
            self._post.send(0, CALL, ("rounds", (name, calls)))
            self._comm.Recv(word, 0)
        yield
        if name in self._forms:
            self._comm.Recv(word, 0)

    def _statistics(self) -> Statistics:
        """While nothing is under way."""
        self._workers.Barrier()
        found: Statistics = self._opt.statistics()
        self._workers.Barrier()
        return found

    # Verification.

    def _verify_step(self) -> None:
        params, grads = (values.random(self._shapes, self._dtype, seed) for seed in (0, 1))
        self._begin(params, grads)
        self._step()
        self._pull()
        expected = values.after_a_step(params, grads, self._workers.Get_size(), self._averages)
        self._judge("a step", values.different(self._params, expected))

    def _verify_peers(self) -> None:
        for name, form in self._forms.items():
            with self._rounds(name, 1):
                form.work()
            assert self._raw is not None
            self._judge(f"a round of {name}", self._raw.wrong(name))

    def _verify_all(self, updates: int, steps: int, start: list[Any]) -> None:
        self._pull()
        expected = steps * (1 if self._averages else self._workers.Get_size())
        problem = values.wrong_after(updates, self._params, start, self._grads)
        if updates != expected:
            problem = f"there were {updates} updates, and should be {expected}"
        self._judge(f"training by {updates} updates", problem)

    def _pull(self) -> None:
        """What all steps together gave."""
        self._workers.Barrier()
        self._opt.pull(self._params)
        self._workers.Barrier()

    def _judge(self, what: str, problem: str) -> None:
        for worker, words in enumerate(self._workers.allgather(problem)):
            if words:
                raise WrongResultError(f"ps {self.what['set']}: {what} is wrong on worker {worker}: {words}")
