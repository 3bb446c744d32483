"""Which processes can read each other's memory files. It does not know what for."""

from __future__ import annotations

import os
from pathlib import Path


def shared_host() -> str:
    """The same for two processes of one boot, process namespace and user; empty where /proc does
    not tell."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return ""
