"""The connection of the chief's watcher to `allred run`: reports of the ranks up, signals to the ranks down.

    hello size            the first message, with the number of ranks
    joined, left, failed, session, unreachable     events of job_state.py
    verdict               the failure that ends the job, once

`allred run` answers with `starts`, the starts of the job for monitors, and with messages to ranks: `signal` with its
number, or `stop`, which ends the session of all ranks after the current step, with the reason.
"""

import os

PURPOSE = "runner"
VARIABLE = "ALLRED_RUNNER"
RESTART = "restart of the job"  # the reason of a stop request, if the number of ranks changes
REPORTED = ("joined", "left", "failed", "session", "unreachable")

_address: str | None = None  # before the first call of `address`


def address() -> str:
    """Return where `allred run` listens: address, port and secret; "" if this rank was started in another way.

    Removes the variable from the environment: programs that this one starts are not ranks of the job."""
    global _address
    if _address is None:
        _address = os.environ.pop(VARIABLE, "")
    return _address
