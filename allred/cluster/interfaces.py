"""Network interfaces of this host."""

import fcntl
import socket
import struct

_SIOCGIFFLAGS, _SIOCGIFADDR = 0x8913, 0x8915  # linux/sockios.h
_IFF_RUNNING = 0x40  # linux/if.h


def ipv4_addresses() -> dict[str, str]:
    """Return the IPv4 address of each interface that has one, is up, and has a link."""
    found = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                [flags] = struct.unpack("16xH", fcntl.ioctl(any_socket, _SIOCGIFFLAGS, request)[:18])
                address = socket.inet_ntoa(fcntl.ioctl(any_socket, _SIOCGIFADDR, request)[20:24])
            except OSError:  # it has no IPv4 address, or was removed
                continue
            if flags & _IFF_RUNNING:
                found[name] = address
    return found
