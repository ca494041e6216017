"""Time the magics in a real Jupyter kernel (start, round trip, interrupt), and count processes left by a killed kernel.

Needs `pip install ipykernel jupyter_client`. Prints one line per result. Run it on an idle machine.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import time
from typing import Any

import psutil
from jupyter_client.manager import start_new_kernel


def run(client: Any, source: str) -> float:
    begin_s = time.monotonic()
    reply = client.execute_interactive(source, timeout=120, output_hook=lambda message: None)
    if reply["content"]["status"] != "ok":
        raise SystemExit(f"{source!r}: {reply['content'].get('evalue')}")
    return time.monotonic() - begin_s


def start(ranks: int) -> tuple[Any, Any, float]:
    manager, client = start_new_kernel(startup_timeout=60)
    run(client, "%load_ext paceline")
    return manager, client, run(client, f"%dist_init -n {ranks} --device cpu")


def interrupt(manager: Any, client: Any, source: str) -> float:
    """Measure the seconds from an interrupt to the end of the cell on all ranks."""
    message = client.execute(f"print('now')\n{source}")
    while "now" not in str(client.get_iopub_msg(timeout=60)["content"]):
        pass
    time.sleep(1.0)
    begin_s = time.monotonic()
    manager.interrupt_kernel()
    while True:
        reply = client.get_shell_msg(timeout=60)
        if reply["parent_header"].get("msg_id") == message:
            return time.monotonic() - begin_s


def kill(ranks: int) -> list[int]:
    """Kill the kernel with SIGKILL during a cell and return the processes left after 5 s."""
    manager, client, _ = start(ranks)
    client.execute("import time\nprint('now')\ntime.sleep(600)")
    while "now" not in str(client.get_iopub_msg(timeout=60)["content"]):
        pass
    pid = manager.provisioner.pid
    left = [process.pid for process in psutil.Process(pid).children(recursive=True)]
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while any(map(psutil.pid_exists, left)) and time.monotonic() < deadline:
        time.sleep(0.05)
    client.stop_channels()
    manager.cleanup_resources()
    return [one for one in left if psutil.pid_exists(one)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument("--starts", type=int, default=5)
    parser.add_argument("--kills", type=int, default=20)
    options = parser.parse_args()
    starts = []
    for number in range(options.starts):
        manager, client, start_s = start(options.ranks)
        starts.append(start_s)
        if number < options.starts - 1:
            client.stop_channels()
            manager.shutdown_kernel(now=True)
    print(f"start of {options.ranks} ranks: median {statistics.median(starts):.2f} s, maximum {max(starts):.2f} s")
    for name, source in (
        ("empty", "1;"),
        ("printing", "print(rank)"),
        ("all-reduce", "dist.all_reduce(torch.ones(1))"),
    ):
        times = sorted(run(client, source) for _ in range(options.cells))
        p50, p99 = times[len(times) // 2], times[int(len(times) * 0.99)]
        print(f"round trip of a cell ({name}): p50 {p50 * 1e3:.1f} ms, p99 {p99 * 1e3:.1f} ms")
    local = sorted(run(client, "%%local\n1") for _ in range(options.cells))
    print(f"round trip without ranks: p50 {local[len(local) // 2] * 1e3:.1f} ms")
    waits = {
        "Python": "while True: pass", "sleep": "import time; time.sleep(600)",
        "all-reduce without one rank": "dist.all_reduce(torch.ones(1)) if rank else time.sleep(600)",
        "recv on all ranks": "dist.recv(torch.ones(1), 1 - rank)",
    }  # fmt: skip
    for name, source in waits.items():
        print(f"interrupt ({name}): {interrupt(manager, client, source):.2f} s")
    client.stop_channels()
    manager.shutdown_kernel(now=True)
    left = [kill(options.ranks) for _ in range(options.kills)]
    print(f"kernels killed with SIGKILL that left no processes: {sum(not one for one in left)} of {len(left)}")


if __name__ == "__main__":
    main()
