"""The exceptions of allred. All derive from AllredError, and each also from the built-in it is a kind of."""


class AllredError(Exception):
    """Base of every error that allred raises on purpose."""


class NotInitializedError(AllredError, RuntimeError):
    """Something needs the ranks, and `allred.init()` has not been called."""


class ConfigError(AllredError, ValueError):
    """A setting (an `ALLRED_*` variable or an argument of `init`) is unknown, malformed or differs between ranks."""


class InputError(AllredError, ValueError):
    """An argument that cannot be used: a dtype, a shape, a read-only array. Collectives raise it on every rank."""


class MismatchError(AllredError, ValueError):
    """The ranks called different operations, or the same one with different tensors. Same text on every rank."""


class DriftError(MismatchError):
    """Parameters or optimizer states that must be equal on all ranks are not. Same text on every rank."""


class NonFiniteError(AllredError, ArithmeticError):
    """A gradient holds NaN or infinity on some rank, or its sum does. Same text on every rank."""


class CheckpointError(AllredError, OSError):
    """A checkpoint cannot be written, or not be read: the file system refuses, or something is missing or damaged."""


class DataError(AllredError, ValueError):
    """Data cannot be had: a file is damaged or not what it should be, or a process that fetches ahead has died."""


class CollectiveTimeout(AllredError, TimeoutError):  # noqa: N818  (the field's word)
    """An operation waited longer than its limit. The communicator cannot be used afterwards."""


class RemoteRankError(AllredError, RuntimeError):
    """Another rank has failed, died, or left while this one waits for it: the job is over.

    rank, host: which one, and where. code: the exit code with which the job ends. traceback: that rank's, as text;
    empty where there is none. The communicator cannot be used afterwards.
    """

    def __init__(self, text: str, rank: int, host: str, code: int, traceback: str = "") -> None:
        super().__init__(f"{text}\n{traceback}".rstrip())
        self.rank = rank
        self.host = host
        self.code = code
        self.traceback = traceback


class ShutdownError(AllredError):
    """Mode ps: a server or a worker has been asked to end (SIGTERM); raised by every worker's next step."""
