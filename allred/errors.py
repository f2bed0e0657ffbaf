"""Exceptions of allred. All derive from AllredError, and each also from the matching built-in exception."""

mpi_numbers = ""  # a sentence about the numbers of ranks; set by init() if MPI.COMM_WORLD has other ones


class AllredError(Exception):
    """Base class of all errors that allred raises on purpose."""

    to_report: list[str]  # the text of an error that an operation has and no wait has raised; else empty
    raised_by_all: int | None = None  # the number of this rank, if all raise it and one of them shall print it

    def __init__(self, *args: object) -> None:
        super().__init__(*args)
        self.to_report = []
        if mpi_numbers and "rank" in str(self):
            self.add_note(mpi_numbers)


class NotInitializedError(AllredError, RuntimeError):
    """A call needs the ranks, but `allred.init()` was not called."""


class ConfigError(AllredError, ValueError):
    """A setting (an `ALLRED_*` variable or an argument of `init`) is unknown, invalid or differs between ranks."""


class InputError(AllredError, ValueError):
    """An argument is invalid: its value, dtype or shape, or a read-only array. Collectives raise it on every rank."""


class MismatchError(AllredError, ValueError):
    """Ranks called different operations, or one operation with different tensors. The text is the same on all ranks."""

    operations_differ = False  # whether the ranks called operations of different kinds or names


class DriftError(MismatchError):
    """Parameters or optimizer states differ between ranks but must be equal. The text is the same on all ranks."""


class NonFiniteError(AllredError, ArithmeticError):
    """A gradient has NaN or infinity on some rank, or the sum has. The text is the same on all ranks."""


class CheckpointError(AllredError, OSError):
    """A checkpoint cannot be written or read: the file system fails, or a file is missing or damaged."""


class DataError(AllredError, ValueError):
    """Data cannot be read: a file is damaged or has another format, or a process that prefetches has died."""


class CollectiveTimeout(AllredError, TimeoutError):  # noqa: N818  (standard name)
    """An operation exceeded its time limit. The communicator cannot be used afterwards."""


class RemoteRankError(AllredError, RuntimeError):
    """Another rank failed, died or exited while this rank waited for it. The communicator cannot be used afterwards.

    Attributes:
        rank, host: that rank and its host.
        code: exit code of the job.
        traceback: traceback of that rank as text; "" if there is none.
    """

    def __init__(self, text: str, rank: int, host: str, code: int, traceback: str = "") -> None:
        super().__init__(f"{text}\n{traceback}".rstrip())
        self.rank = rank
        self.host = host
        self.code = code
        self.traceback = traceback


class RanksChanged(RemoteRankError):  # noqa: N818  (it is an event, and no failure of this rank)
    """The ranks of a job of `allred run --elastic` change, because one has died or others join. The operation in which
    it is raised has not completed on this rank. The next batch of `allred.data` forms the new world (docs/recovery.md).

    rank: the rank that has died; -1 if none has.
    """


class ShutdownError(AllredError):
    """Mode ps: a server or worker received SIGTERM. The next step of every worker raises it."""
