"""A client: a task of job "client" that has the other tasks run functions, while these are in `Server.join()`.

Functions and what they return travel as MPI messages (message.py) between the client (session.py, caller.py) and a task
(serving.py). calling.py: what init() made for both.
"""

from allred.client.session import Call, ClientSession

__all__ = ["Call", "ClientSession"]
