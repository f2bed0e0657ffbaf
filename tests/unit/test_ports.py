"""A reserved port belongs to the program that is given its number."""

import socket

import pytest
from ports import reserved_ports


@pytest.mark.parametrize("address", ["127.0.0.1", ""])
def test_only_a_server_that_is_given_a_reserved_port_listens_there(address):
    [port] = reserved_ports(1)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port))
    with socket.socket() as other, pytest.raises(OSError, match="Address already in use"):
        other.bind((address, port))  # as for a port that Linux chooses, without SO_REUSEADDR
    with socket.create_server((address, port)), socket.create_connection(("127.0.0.1", port)):
        pass
