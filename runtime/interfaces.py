"""Bytes that a node's network interface has sent and received, as the kernel counts them."""

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class InterfaceBytes:
    """Counters of one interface; headers are included."""

    name: str
    sent_bytes: int
    received_bytes: int

    def since(self, before: "InterfaceBytes") -> "InterfaceBytes":
        return InterfaceBytes(
            self.name, self.sent_bytes - before.sent_bytes, self.received_bytes - before.received_bytes
        )


def read_interface() -> InterfaceBytes | None:
    """The interface that collectives use, in this process's network namespace.

    None where it is not known or is the loopback, whose traffic belongs to no node.
    """
    name = os.environ.get("GLOO_SOCKET_IFNAME") or os.environ.get("NCCL_SOCKET_IFNAME")
    if not name or name == "lo":
        return None
    return parse_counters(Path("/proc/self/net/dev").read_text(encoding="ascii"), name)


def interface_since(before: InterfaceBytes | None) -> InterfaceBytes | None:
    """What it has sent and received since `read_interface` said `before`."""
    after = read_interface()
    return after.since(before) if before is not None and after is not None else None


def parse_counters(text: str, name: str) -> InterfaceBytes | None:
    """The line of `name` in the format of /proc/net/dev."""
    for line in text.splitlines():
        interface, colon, figures = line.partition(":")
        if colon and interface.strip() == name:
            columns = figures.split()
            return InterfaceBytes(name, sent_bytes=int(columns[8]), received_bytes=int(columns[0]))
    return None
