"""IP addresses of NICs: as libfabric gives them (struct sockaddr), and as people write them.

>>> text_of(raw)
'10.0.0.5:41234'
>>> replaced(raw, "203.0.113.7")                 # the same port at another host
>>> replaced(raw, "[2001:db8::7]:7000")
"""

from __future__ import annotations

import ipaddress
import re
import socket
import struct

from .errors import ConfigError

__all__ = ["names_of", "replaced", "text_of"]

# Linux's sockaddr_in and sockaddr_in6: ip(7), ipv6(7). Family in host order, port in network order.
_IN = struct.Struct("=H2s4s8x")
_IN6 = struct.Struct("=H2sI16sI")
_HOST_AND_PORT = re.compile(r"(?:\[(?P<v6>[^\]]*)\]|(?P<v4>[^:]*))(?::(?P<port>\d{1,5}))?")


def text_of(raw: bytes) -> str | None:
    """``host:port`` or ``[host]:port``; None if these bytes are no IP address."""
    names = names_of(raw)
    return names[0] if names else None


def names_of(raw: bytes) -> list[str]:
    """What the address may be called: with its port, and without; nothing if it is no IP address."""
    parts = _parse(raw)
    if parts is None:
        return []
    host, port = parts
    return [f"[{host}]:{port}", f"[{host}]", str(host)] if host.version == 6 else [f"{host}:{port}", str(host)]


def replaced(raw: bytes, text: str) -> bytes:
    """The address that ``text`` names: ``host`` with the port of ``raw``, or ``host:port``; IPv6 as ``[host]:port``.

    Raises
    ------
    ConfigError
        If ``text`` is no IP address, or ``raw`` is not one: InfiniBand and shared memory have no other names.
    """
    own = _parse(raw)
    if own is None:
        raise ConfigError(f"cannot advertise {text!r}: the NIC's own address is no IP address")
    try:
        host, port = ipaddress.ip_address(text), own[1]  # a bare IPv6 address has colons, too
    except ValueError:
        found = _HOST_AND_PORT.fullmatch(text)
        try:
            host = ipaddress.ip_address((found["v6"] or found["v4"]) if found else "")
        except ValueError:
            raise ConfigError(f"cannot advertise {text!r}: it is neither an IP address nor address:port") from None
        assert found is not None
        port = own[1] if found["port"] is None else int(found["port"])
    if not 0 < port < 65536:
        raise ConfigError(f"cannot advertise {text!r}: port {port} is out of range")
    network_port = port.to_bytes(2, "big")
    if host.version == 4:
        return _IN.pack(socket.AF_INET, network_port, host.packed)
    return _IN6.pack(socket.AF_INET6, network_port, 0, host.packed, _scope_of(text, host))


def _scope_of(text: str, host: ipaddress.IPv6Address) -> int:
    scope = host.scope_id
    if scope is None:
        return 0
    try:
        return int(scope) if scope.isdecimal() else socket.if_nametoindex(scope)
    except OSError:
        raise ConfigError(f"cannot advertise {text!r}: there is no interface {scope!r}") from None


def _parse(raw: bytes) -> tuple[ipaddress.IPv4Address | ipaddress.IPv6Address, int] | None:
    if len(raw) == _IN.size:
        family, port, host = _IN.unpack(raw)
        if family == socket.AF_INET:
            return ipaddress.IPv4Address(host), int.from_bytes(port, "big")
    elif len(raw) == _IN6.size:
        family, port, _, host, _ = _IN6.unpack(raw)
        if family == socket.AF_INET6:
            return ipaddress.IPv6Address(host), int.from_bytes(port, "big")
    return None
