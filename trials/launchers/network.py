"""Addresses and network interfaces of this machine."""

import ipaddress
import logging
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import psutil

from trials.errors import SiteError

_log = logging.getLogger(__name__)
_ANY_PORT = 9
"""No packet is sent: only the route is looked up."""
_ANYWHERE = "192.0.2.1"
"""An address for documentation (RFC 5737), to which only the default route leads."""
_IP = (socket.AF_INET, socket.AF_INET6)


def address_towards(host: str) -> str:
    """Return the address of this machine from which it reaches `host`.

    Raise SiteError for a host that has no address, and where no route leads to it.
    """
    family, target = _resolved(host)
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(target)
        except OSError as error:
            raise SiteError(f"no route leads to {host} ({error.strerror}); check the network") from error
        return str(probe.getsockname()[0])


def address_of_agent(named: str | None, hosts: Sequence[str] | None) -> str:
    """Return the address of this machine at which others reach it.

    It is the `named` one of its own, or else that towards the second of the `hosts`, which follow `ssh`'s spelling, or
    that of the default route. Raise SiteError as the functions below do.
    """
    if named is not None:
        return own_address(named)
    others = [host.rpartition("@")[2] for host in (hosts or ())[1:]]
    return address_towards((*others, _ANYWHERE)[0])


def own_address(name: str) -> str:
    """Return the address of this machine that `name` means. Raise SiteError when it is none of this machine.

    Warn of one that others cannot reach, as some systems give to their own name in /etc/hosts.
    """
    address = str(_resolved(name)[1][0])
    interface_of(address)
    if ipaddress.ip_address(address).is_loopback:
        _log.warning(
            "hardware.address: %s is %s here, where other machines do not reach this one; give its address in the "
            "network that joins the nodes",
            name,
            address,
        )
    return address


def check_first(hosts: Sequence[str], key: str) -> None:
    """Raise SiteError where the first of the hosts, which follow `ssh`'s spelling, is not this machine.

    It is when it has the name of this machine, short or in full, or an address to which a socket here can be bound.
    `key` is the one of the job that names the hosts.
    """
    first, own = hosts[0].rpartition("@")[2], socket.gethostname()
    if own not in (first, first.partition(".")[0]) and own.partition(".")[0] != first and not _is_bound(first):
        raise SiteError(
            f"{key} begins with {first}, but this machine is {own} and has no address of that name; name {own} first, "
            f"or start the command on {first}"
        )


def _is_bound(host: str) -> bool:
    """Return whether a socket can be bound to an address of the host."""
    with suppress(OSError, UnicodeError):  # without an address, and no name at all
        for family, _, _, _, target in socket.getaddrinfo(host, None, type=socket.SOCK_DGRAM):
            with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.bind(target)
                return True
    return False


def free_port(address: str) -> int:
    """Return a port at which nothing listens now, for a tool that cannot ask the system for one."""
    with socket.create_server((address, 0), family=_resolved(address)[0]) as free:
        return int(free.getsockname()[1])


def _resolved(host: str) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    try:
        family, _, _, _, target = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
    except socket.gaierror as error:
        raise SiteError(f"{host} has no address ({error.strerror}); correct the name of the host") from error
    return family, target


def interface_of(address: str) -> str:
    """Return the network interface of this machine with an address. Raise SiteError where there is none."""
    wanted = ipaddress.ip_address(address)
    interfaces = [
        (name, each.address) for name, found in psutil.net_if_addrs().items() for each in found if each.family in _IP
    ]
    own = [(name, ipaddress.ip_address(text.partition("%")[0])) for name, text in interfaces]
    for name, each in own:
        if each == wanted or (each.is_loopback and wanted.is_loopback):
            return name
    if wanted.is_loopback:
        return "lo"
    raise SiteError(f"this machine has no network interface with the address {address}; correct the address")
