"""The address at which other nodes reach this one."""

from __future__ import annotations

import contextlib
import fcntl
import ipaddress
import socket
import struct
from collections.abc import Sequence
from urllib.parse import urlsplit

from elastic_harness.errors import ConfigError
from elastic_harness.etcd.address import PORT

_SIOCGIFADDR = 0x8915
_ELSEWHERE = ("192.0.2.1", 9)  # an address reserved for documentation: to look up the route there sends nothing


def own_address(given: str | None, store: Sequence[str]) -> str:
    """Return the address of this machine that other nodes are told. `given`: an address, a name or a network interface
    of this machine, or None. Without it, it is the address from which the store is reached. If the store is on this
    machine, it is the address from which the rest of the world is reached. `store`: its endpoints. Raises
    ConfigError."""
    if given is not None:
        address = _of_interface(given) or _of_name(given)
        if not _is_ours(address):
            raise ConfigError(
                f"--host is {given!r} ({address}), which is no address of this machine; give an address, a name or a "
                f"network interface ({_interfaces()}) of it"
            )
        if _loopback(address) and not any(_loopback(_from_here_to(endpoint)) for endpoint in store):
            raise ConfigError(
                f"--host is {given!r} ({address}), where no other machine reaches this one; give an address of one of "
                f"{_interfaces()}"
            )
        return address
    address = ""
    for number, endpoint in enumerate(store, 1):
        try:
            address = _from_here_to(endpoint)
            break
        except ConfigError:
            if number == len(store):
                raise
    if _loopback(address):
        with contextlib.suppress(OSError):
            return _towards(*_ELSEWHERE)
    return address


def _loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _from_here_to(endpoint: str) -> str:
    """Return the address of this machine from which an endpoint of the store is reached."""
    url = urlsplit(endpoint)
    assert url.hostname is not None
    return _towards(url.hostname, url.port or PORT)


def _towards(host: str, port: int) -> str:
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as sock:
            sock.connect(target)
            return str(sock.getsockname()[0])
    except socket.gaierror as error:
        raise ConfigError(f"the store's host {host!r} has no address ({error.strerror})") from error
    except OSError as error:
        if (host, port) == _ELSEWHERE:
            raise
        raise ConfigError(f"there is no way to the store's host {host!r} ({error.strerror})") from error


def _of_interface(name: str) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])


def _of_name(name: str) -> str:
    try:
        return str(socket.getaddrinfo(name, None)[0][4][0])
    except socket.gaierror as error:
        raise ConfigError(
            f"--host is {name!r}, which is no address, no network interface ({_interfaces()}), and no name that can be "
            f"resolved ({error.strerror})"
        ) from error


def _is_ours(address: str) -> bool:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as sock:
            sock.bind((address, 0))
        return True
    except OSError:
        return False


def _interfaces() -> str:
    return ", ".join(name for _, name in socket.if_nameindex())
