"""The server's side of `bench ps`: a parameter server that workers can call out of its loop, for rounds of raw MPI."""

import functools
from typing import Any

import numpy as np

from allred.bench.peer import Raw
from allred.bench.values import LR
from allred.bench.verify import WrongResultError
from allred.modes.options import Options
from allred.optim import SGD
from allred.ps.calls import LATER, Calls
from allred.ps.consistency import Policy
from allred.ps.running import Running
from allred.ps.server import Server


class _Calls(Calls):
    """problem: what a worker found to be wrong."""

    def __init__(self, *arguments: Any, comm: Any, raw: Raw | None, problem: list[str]) -> None:
        super().__init__(*arguments)
        self._comm, self._raw, self._problem = comm, raw, problem

    def _rounds(self, worker: int, name: str, count: int) -> Any:
        """So many of a peer's."""
        assert self._raw is not None
        way = self._raw.forms[name]
        word = np.empty(0, np.uint8)
        self._comm.Send(word, worker + 1)  # it can begin
        for _ in range(count):
            way.serve()
        self._comm.Send(word, worker + 1)  # all is done
        return LATER  # there is no other answer

    def _give_up(self, worker: int, problem: str) -> Any:
        self._problem.append(problem)
        return LATER


def serve(here: Running, policy: Policy, comm: Any, raw: Raw | None) -> None:
    """Until the last worker has left. Raises WrongResultError if a worker told of one."""
    problem: list[str] = []
    optimizer, options = SGD(lr=LR), Options("opt", consistency=policy)
    agreement = options.agreement(optimizer, here.config)
    calls = functools.partial(_Calls, comm=comm, raw=raw, problem=problem)
    Server(here, optimizer, policy, options.locks(optimizer, here.config), agreement, calls=calls).serve()
    if problem:
        raise WrongResultError(problem[0])
