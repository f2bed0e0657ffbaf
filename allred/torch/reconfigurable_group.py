"""A process group that its processes form again with other ranks, by `dist._reconfigure` (torch 2.14 and later).

    dist.init_process_group("allred", store=store, rank=rank, world_size=size, enable_reconfigure=True)
    handle = dist._get_reconfigure_handle()          # the program exchanges them
    dist._reconfigure(uuid, handles).wait()          # the processes of these handles call it; a list has the rank order

Each call makes a world without MPI and without watchers. If a process ends, the operations of the others raise
RemoteRankError; they call it again with new handles, without that process. The program decides who takes part, and
copies its state itself.

A handle names the address at which the process listens, and a secret. A call uses it up.
"""

import hashlib
import json
import os
import secrets
import select
import socket
import threading
from typing import Any

import torch.distributed as dist
from torch._C import _distributed_c10d

from allred import changing_worlds, world
from allred.errors import AllredError, CollectiveTimeout, ConfigError, InputError, RemoteRankError
from allred.launch.rendezvous_bootstrap import RendezvousConnection
from allred.launch.rendezvous_client import open_listener, rendezvous
from allred.torch.process_group import ProcessGroupAllred
from allred.torch.torch_work import TorchWork, as_torch_error

_LIMIT_S = 1800.0  # for the other processes to call it, without a timeout


class _NoCommunicator:
    """Replaces the communicator until `reconfigure`. rank, size: the last ones; first those of init_process_group."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def __getattr__(self, name: str) -> Any:
        raise InputError("this process group has no ranks: call dist._reconfigure first")


def _no_communicator(rank: int, size: int) -> Any:
    return _NoCommunicator(rank, size)


class ReconfigurableGroup(ProcessGroupAllred):
    """The default process group of `init_process_group(..., enable_reconfigure=True)`."""

    supports_reconfigure = True

    def __init__(self, options: Any) -> None:
        if world.is_initialized():
            raise InputError(
                "init_process_group(enable_reconfigure=True): the ranks of this process were joined already, by "
                "allred.init() or by a launcher; start the processes without one"
            )
        limit = options.timeout if options.timeout != dist.constants.default_pg_timeout else None
        super().__init__(_no_communicator(options.group_rank, options.group_size), options.store, limit)
        self._listener: socket.socket | None = None
        self._handle = ""
        self._uuids = set[int]()
        self._connection: RendezvousConnection | None = None
        self._ends: _EndListener | None = None

    def get_reconfigure_handle(self) -> str:
        """Return the handle of this process, the same until the next `reconfigure`."""
        if self._listener is None:
            other = os.environ.get("MASTER_ADDR", socket.gethostname())
            self._listener, address = open_listener(on_one_host=False, other_host=other)
            self._handle = json.dumps({"address": address, "secret": secrets.token_hex(16)})
        return self._handle

    def reconfigure(self, opts: Any) -> TorchWork:
        """Form the group of the processes with `opts.handles`. Returns when all have called it. Raises InputError for
        wrong arguments, CollectiveTimeout after `opts.timeout`."""
        try:
            self._form(opts)
        except AllredError as error:
            as_torch_error(error)
            raise
        return TorchWork([], [], None)

    def _form(self, opts: Any) -> None:
        uuid, mine = int(opts.uuid), self.get_reconfigure_handle()
        handles = list(opts.handles) if isinstance(opts.handles, (list, tuple)) else sorted(opts.handles)
        if uuid in self._uuids:
            raise InputError(f"reconfigure: uuid {uuid} was already used; pass a new one in each call")
        if handles.count(mine) != 1:
            raise InputError(
                f"reconfigure: the {len(handles)} handles have this process {handles.count(mine)} times, expected "
                "once. A handle is valid for one call: exchange the results of dist._get_reconfigure_handle() again"
            )
        try:
            about = [json.loads(handle) for handle in handles]
            addresses = {f"rank {rank}": "" + each["address"] for rank, each in enumerate(about)}
            secret = hashlib.sha256(" ".join([str(uuid), *(each["secret"] for each in about)]).encode()).hexdigest()
        except (ValueError, KeyError, TypeError):
            raise InputError("reconfigure: a handle is not a result of dist._get_reconfigure_handle()") from None
        limit_s = opts.timeout.total_seconds() if opts.timeout is not None else 0.0
        limit_s = limit_s if limit_s > 0 else self._timeout_s or _LIMIT_S
        self._uuids.add(uuid)
        self._leave()
        listener, self._listener = self._listener, None
        name = f"rank {handles.index(mine)}"
        try:
            joined = rendezvous(addresses, name, secret, limit_s, listener)
        except CollectiveTimeout:
            raise CollectiveTimeout(
                f"reconfigure: {name} has waited {limit_s:g} s (timeout) for the other {len(handles) - 1} processes"
            ) from None
        except ConfigError as error:
            raise InputError(f"reconfigure: the processes pass different uuids or handles ({error})") from None
        self._connection = connection = RendezvousConnection(joined, limit_s, tuple(addresses))
        connection.report("starts")  # never "up": so it reports the ends of the others
        try:
            changing_worlds.join_group(connection)
        except BaseException:
            self._leave()
            raise
        self._ends = _EndListener(connection, world.current())
        self.begin_world()

    def _leave(self) -> None:
        if self._connection is not None:  # else the world, if there is one, is not of this group
            changing_worlds.abandon()
            self.communicator = _no_communicator(self.communicator.rank, self.communicator.size)
        (ends, self._ends), (connection, self._connection) = (self._ends, None), (self._connection, None)
        if ends is not None:
            ends.close()
        if connection is not None:
            connection.close()

    def abort(self) -> None:
        """End the operations that wait, with an error. `reconfigure` makes the group usable again."""
        if self._ends is not None:
            self.communicator.queue.poison("the process group was aborted")

    def get_error(self) -> Any:
        """Return ErrorType.COMM_ERROR if a process of the group has ended."""
        kinds = _distributed_c10d.ErrorType
        return kinds.COMM_ERROR if world.error() is not None else kinds.SUCCESS

    def shutdown(self) -> None:
        """Leave the group."""
        self._leave()
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def __repr__(self) -> str:
        return f"ReconfigurableGroup(rank {self.communicator.rank} of {self.communicator.size})"


class _EndListener:
    """A thread that notes in a world that another process of it has ended."""

    def __init__(self, connection: RendezvousConnection, here: world.World) -> None:
        self._connection, self._world, self._closed = connection, here, os.eventfd(0)
        self._thread = threading.Thread(target=self._run, name="allred-ends", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        poll = select.poll()
        for file in (self._connection.lifeline, self._closed):
            poll.register(file, select.POLLIN)
        if self._closed not in dict(poll.poll()):
            who = self._connection.peek().partition(" has ended")[0] or "another process of the group"
            text = f"{who} has ended; call dist._reconfigure without it"
            self._world.failure = RemoteRankError(text, -1, "", 1)

    def close(self) -> None:
        os.eventfd_write(self._closed, 1)
        self._thread.join()
        os.close(self._closed)
