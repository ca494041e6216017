#!/usr/bin/env python
"""Run a `paceline` command on two network namespaces of this machine, joined by a link of a chosen rate.

    benchmarks/limited_link.py [--rate 1gbit] OUT [-- tune --model gpt2-mini ...]

Needs root, `ip` and `tc`. Always removes the namespaces and the link at the end; does not change loopback or other
interfaces.
"""

from __future__ import annotations

import argparse
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from paceline.studies.fault_places import HOST_ADDRESS, HOST_PORT, link_hosts, why_not

DEFAULT = "tune --model gpt2-mini --batch-size 4 --backend gloo --wrapper torch"
SECRET = secrets.token_hex(16)  # the ranks share cores but no sockets, so they rendezvous like separate hosts
TIMEOUT_S = 900


def run_ranks(command: Sequence[str], names: Sequence[str] = ("", ""), address: str = f"{HOST_ADDRESS}.1") -> int:
    """Start one rank per namespace (on this host if the name is empty). Rank 0 prints; if one rank fails, both stop."""
    ranks = []
    for rank, name in enumerate(names):
        place = {
            "MASTER_ADDR": address, "MASTER_PORT": str(HOST_PORT), "RANK": str(rank), "WORLD_SIZE": "2",
            "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": "2", "PACELINE_SECRET": SECRET,
        }  # fmt: skip
        place |= {"GLOO_SOCKET_IFNAME": "eth0"} if name else {}
        inside = ["ip", "netns", "exec", name] if name else []
        ranks.append(subprocess.Popen([*inside, sys.executable, *command], env={**os.environ, **place}))
    until_s = time.monotonic() + TIMEOUT_S
    try:
        while time.monotonic() < until_s:
            codes = [rank.poll() for rank in ranks]
            if any(codes) or None not in codes:
                return next((1 for code in codes if code), 0)
            time.sleep(0.2)
        print(f"timed out after {TIMEOUT_S} s", file=sys.stderr)
        return 1
    finally:
        for rank in ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()


def run_again(rate: str) -> NoReturn:
    """Rerun this program with `--is-rank` on both hosts; `none` runs both ranks here and does not require root."""
    command = [str(Path(sys.argv[0]).resolve()), *sys.argv[1:], "--is-rank"]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # run the cleanup that removes the namespaces
    if rate == "none":
        sys.exit(run_ranks(command, address="127.0.0.1"))
    check_rights()
    with link_hosts(rate) as names:
        sys.exit(run_ranks(command, names))


def check_rights() -> None:
    if why := why_not("hosts"):
        raise SystemExit(why)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rate", default="1gbit")
    parser.add_argument("arguments", nargs="*")
    asked = parser.parse_args()
    check_rights()
    with link_hosts(asked.rate) as names:
        arguments = asked.arguments or DEFAULT.split()
        sys.exit(run_ranks(["-m", "paceline", *arguments, "--out", str(asked.out)], names))


if __name__ == "__main__":
    main()
