"""Clients: a task of job "client" runs functions on the other tasks, while these are in `Server.join()`.

client_session.py is the public API. call.py: the handle of a call, and messages. rpc.py: both ends of the connection.
"""

from allred.client.call import Call
from allred.client.client_session import ClientSession

__all__ = ["Call", "ClientSession"]
