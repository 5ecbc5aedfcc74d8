"""Addresses of this machine."""

import socket

from autotune.errors import HardwareError

_ANY_PORT = 9
"""No packet is sent: only the route is looked up."""


def address_towards(host: str) -> str:
    """Return the address of this machine from which it reaches `host`.

    Raise HardwareError for a host that has no address, and where no route leads to it.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise HardwareError(f"{host} has no address ({error.strerror}); correct the name of the host") from error
    with socket.socket(family, kind) as probe:
        try:
            probe.connect(target)
        except OSError as error:
            raise HardwareError(f"no route leads to {host} ({error.strerror}); check the network") from error
        return str(probe.getsockname()[0])
