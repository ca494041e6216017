"""`paceline.watch`: a live page of a run, served on loopback, and the same numbers in a terminal.

The server reads the files that the run writes, four times a second, and sends nothing to the run. It keeps serving
after the run has ended, and shows how the run ended. `verbs.attach` uses it to serve the page of a user's program.
"""

from __future__ import annotations

import collections
import contextlib
import fcntl
import hmac
import json
import os
import secrets
import statistics
import subprocess
import sys
import threading
import time
import webbrowser
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, cast
from urllib.parse import parse_qs, urlsplit

from paceline.errors import ConfigError, RecordError, refuse
from paceline.predict.accounting import build_rank_row
from paceline.records.store import open_file
from paceline.records.training import METRICS_FILE, list_ranks, load_config, pick_like_last
from paceline.report.observed import WHERE
from paceline.report.page import render_page, render_table, save_page, split_verdict
from paceline.report.result import Result, load_result
from paceline.report.table import Table
from paceline.report.training_result import TrainRunResult
from paceline.units import format_duration, format_ms, format_speed

_POLL_S = 0.4
_BEAT_S = 5.0  # interval between events if there are no new rows
_LINGER_S = 60.0
_RECENT = 50  # steps in the table of recent steps
_SILENT_S = 2.0  # seconds without a step after which to check whether the run has ended
_SHARE = 0.002  # maximum fraction of one core used for computing verdicts
_MOST_VIEWERS = 16


class Follower:
    """Follows the rows that a run writes, one per step. `how` is "running", "finished", "stopped" or "killed"."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.place = 0  # bytes read from the metrics file
        self.lock = threading.RLock()
        self._recent: collections.deque[dict[str, Any]] = collections.deque(maxlen=_RECENT)
        self._seen_s = time.monotonic()  # time of the last new row
        self._due_s = 0.0  # time of the next verdict
        self.how = "running"
        self.text = ""
        self.verdict = ("", "")
        self.update()

    def load(self) -> Result:
        """The result to show."""
        return TrainRunResult.load(self.folder)

    def find_end(self, step: int) -> tuple[str, str]:
        """How the run ended, as a state and as text. Called when there has been no step for a while."""
        if _is_locked(self.folder):
            return "running", "Running"
        document = load_config(self.folder)
        if step > 0 and (document.get("outcome") or {}).get("steps") == step:
            return "finished", "Finished"
        if ended := document.get("end"):
            return "stopped", f"Ended early: {ended}"
        return "killed", "Killed, or its machine stopped: the run ended without a final status"

    def read(self, place: int) -> tuple[list[str], int, int]:
        """Read the complete lines of the metrics from this byte onward. Returns the lines and the positions where they
        start and end.

        They start at 0 if rows were truncated after a fault or a resume: the file is shorter, or no row starts at this
        byte.
        """
        try:
            with open_file(self.folder / METRICS_FILE) as file:
                file.seek(max(0, place - 1))
                content = file.read()
                if place and content[:1] != b"\n":
                    file.seek(0)
                    place, content = 0, file.read()
        except FileNotFoundError:
            return [], 0, 0
        content = content[1:] if place else content
        whole = content[: content.rfind(b"\n") + 1]
        return whole.decode().splitlines(), place, place + len(whole)

    def update(self) -> None:
        """Read new rows, and update the status."""
        with self.lock:
            lines, begin, end = self.read(self.place)
            if begin < self.place:
                self._recent.clear()
            self._recent.extend(map(json.loads, lines[-_RECENT:]))
            now_s = time.monotonic()
            self.place = end
            self._seen_s = now_s if lines else self._seen_s
            if not lines and self.text and now_s - self._seen_s < _SILENT_S:
                return
            step = self._recent[-1]["step"] if self._recent else 0
            self.how, said = ("running", "Running") if lines else self.find_end(step)
            self.text = f"{said}: {self._describe(step)}."
            if self._recent and now_s > self._due_s:
                with contextlib.suppress(RecordError):
                    self.verdict = split_verdict(self.load().headline)
                self._due_s = time.monotonic() + max(10.0, (time.monotonic() - now_s) / _SHARE)

    def _describe(self, step: int) -> str:
        rows = list(self._recent)
        if not rows:
            return "no step taken yet"
        found, last, seconds = f"step {step}", rows[-1], sum(row["step_s"] for row in rows)
        if "epoch" in last:
            speed = format_speed(sum(row["samples"] for row in rows) / seconds) if seconds else "0"
            loss = f", loss {last['loss']:.4f}" if isinstance(last["loss"], float) else ""
            found += f" in epoch {last['epoch'] + 1}{loss}, {speed} samples/s"
        else:
            found += f", {format_ms(statistics.median(row['step_s'] for row in rows))} ms per step"
        for words, name in (("data wait", "data_wait_s"), ("exposed communication", "exposed_comm_s")):
            parts = [(row[name], row["step_s"]) for row in rows if row.get(name) is not None]
            if parts and seconds:
                found += f", {words} {sum(part for part, _ in parts) / sum(whole for _, whole in parts):.1%}"
        bad = [row["step"] for row in rows if "not_finite" in row]
        silent_s = time.monotonic() - self._seen_s
        found += f"; warning: the loss of step {bad[0]} is not finite" if bad else ""
        return found + (f"; no step for {format_duration(silent_s)}" if silent_s > 10 and self.how == "running" else "")

    @property
    def now(self) -> Table:
        """Where the time of recent steps went, by rank."""
        rows = pick_like_last(self._recent)
        names = ("step_s", "data_wait_s", "forward_s", "backward_s", "exposed_comm_s", "optimizer_s")
        found: dict[int, list[float | None]] = {}
        for name in names if rows else ():
            by_rank = zip(*(list_ranks(row, name) for row in rows if name in row), strict=False)
            for rank, values in enumerate(by_rank):
                known = [value for value in values if value is not None]
                medians = found.setdefault(rank, [None] * len(names))
                medians[names.index(name)] = statistics.median(known) if known else None
        sent_s = min((medians[4] for medians in found.values() if medians[4] is not None), default=0.0)
        ranks = []
        for rank, (step_s, data_s, forward_s, backward_s, exposed_s, optimizer_s) in found.items():
            parts = {"forward_s": forward_s, "optimizer_s": optimizer_s, "exposed_s": exposed_s and sent_s}
            parts["backward_s"] = backward_s and backward_s - (exposed_s or 0.0)  # a row's backward includes its waits
            parts["waiting_s"] = exposed_s and exposed_s - sent_s
            measured = {name: seconds for name, seconds in parts.items() if seconds is not None}
            rest_s = max(0.0, (step_s or 0.0) - (data_s or 0.0) - sum(measured.values()))
            ranks.append(build_rank_row(rank, step_s or 0.0, data_s or 0.0, measured, rest_s))
        return Table("now", f"the last {len(rows)} steps, median of each rank", WHERE, ranks)

    def render(self) -> str:
        live = {"from": self.place, "status": self.text, "how": self.how}  # read before loading, so no row is missed
        return render_page([self.load()], live=live, now=render_table(self.now))


def _is_locked(folder: Path) -> bool:
    """Whether the run's process holds the lock of its folder. This test holds the lock only briefly, for less time than
    a starting run waits for it."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # locked, or a file system without locks, where the run is assumed to be active
        return True
    finally:
        os.close(handle)
    return False


class Server(ThreadingHTTPServer):
    """Serves the page and its events on loopback, to clients that know the token."""

    daemon_threads = False  # closing the server joins all threads

    def __init__(self, follower: Follower, port: int = 0) -> None:
        super().__init__(("127.0.0.1", port), _Request)
        self.follower = follower
        self.token = secrets.token_urlsafe(24)
        self.num_viewers = 0
        self.is_closing = threading.Event()

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/?token={self.token}"

    def handle_error(self, *_: Any) -> None:
        """Ignore errors of viewers that have disconnected."""


class _Request(BaseHTTPRequestHandler):
    server: Server
    timeout = 30.0

    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        given = parse_qs(asked.query)
        if not hmac.compare_digest(given.get("token", [""])[0].encode(), self.server.token.encode()):
            self._answer(403, "text/plain", "403: the token is missing or wrong; use the address that was printed\n")
        elif asked.path == "/":
            self._answer(200, "text/html; charset=utf-8", self.server.follower.render())
        elif asked.path == "/events" and self.server.num_viewers < _MOST_VIEWERS:
            self._stream(int(given.get("from", ["0"])[0]))
        else:
            self._answer(404, "text/plain", "404\n")

    def _answer(self, code: int, kind: str, text: str = "") -> None:
        self.send_response(code)
        headers = {"Content-Type": kind, "Cache-Control": "no-store", "Referrer-Policy": "no-referrer"}
        headers |= {"X-Content-Type-Options": "nosniff", "Connection": "close"}
        for name, value in (headers | ({"Content-Length": str(len(text.encode()))} if text else {})).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(text.encode())

    def _stream(self, place: int) -> None:
        """Stream rows as they arrive. Tells a page without rows, and the page of an ended run, to reload."""
        follower = self.server.follower
        self.server.num_viewers += 1
        sent_s = 0.0
        try:
            place = int(self.headers.get("Last-Event-ID") or place)
            self._answer(200, "text/event-stream")
            is_new = place == 0
            while not self.server.is_closing.is_set():
                lines, begin, end = follower.read(place)
                if lines:
                    follower.update()  # the status must include these rows
                is_over = follower.how != "running" and not lines
                if lines or is_over or time.monotonic() - sent_s > _BEAT_S:
                    message: dict[str, Any] = {"rows": lines, "status": follower.text}
                    message["verdict"] = follower.verdict if follower.verdict[0] else None
                    message["now"] = render_table(follower.now) if lines else ""
                    message["reload"] = int(is_over or begin < place or (is_new and end > 0))
                    self.wfile.write(f"id: {end}\ndata: {json.dumps(message)}\n\n".encode())
                    self.wfile.flush()
                    place = end
                    sent_s = time.monotonic()
                    if message["reload"]:
                        break
                self.server.is_closing.wait(_POLL_S)
        finally:
            self.server.num_viewers -= 1

    def log_message(self, *_: Any) -> None:
        """Do not log requests: their address contains the token."""


@contextlib.contextmanager
def serve(follower: Follower, port: int | None = None) -> Iterator[Server]:
    """Serve the live page of a run while the context is open."""
    try:
        server = Server(follower, port or 0)
    except OSError as error:
        raise ConfigError(f"--port {port}: {error.strerror}; leave it out to use a free port") from None
    thread = threading.Thread(target=server.serve_forever, args=(0.1,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.is_closing.set()
        server.shutdown()
        server.server_close()
        thread.join(10.0)


def watch(
    run: str | Path,
    *,
    port: int | None = None,
    browser: bool | None = None,
    linger: float = _LINGER_S,
    progress: bool | None = None,
) -> TrainRunResult:
    """Show a training run on a live page and in a terminal; return its result when the run has ended.

    Prints the address of the page. Once the run has ended and the page has had no viewer for a while, or on Ctrl-C, the
    page is saved in the folder of the run.

    Args:
        run: The folder of the run.
        port: Port of the page. Default: a free one.
        browser: Open the page. Default: if there is a display.
        linger: Seconds without a viewer after which the page of an ended run closes.
    """
    found = load_result(run)
    what = f"{run} is a run of `paceline {found.run.verb}`"
    why = f"{what}: view it with `paceline report`, or pass a run of `paceline train`"
    refuse((not isinstance(found, TrainRunResult), why), code="other-verb")
    folder = Path(run)
    over_s = None
    view = _open_view(progress is not False)
    with serve(Follower(folder), port) as server, view or contextlib.nullcontext():
        show_address(server, browser)
        with contextlib.suppress(KeyboardInterrupt):
            while over_s is None or time.monotonic() - over_s < linger:
                follower = server.follower
                follower.update()
                if view is not None:
                    _draw(follower, view)
                if follower.how == "running" or server.num_viewers:
                    over_s = None
                elif over_s is None:
                    over_s = time.monotonic()
                time.sleep(_POLL_S)
        say(server.follower.text)
    result = cast("TrainRunResult", load_result(folder))
    result.page = save_page([result], folder)
    return result


def _open_view(is_drawn: bool) -> Any:
    """A function that draws the status in a terminal on each update; None if there is no terminal."""
    if not (is_drawn and sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    from rich.console import Console
    from rich.live import Live

    return Live(console=Console(stderr=True, highlight=False), auto_refresh=False)


def _draw(follower: Follower, view: Any) -> None:
    from rich.text import Text

    lines = follower.now.terminal(view.console.width).splitlines()
    lines = [line for line in lines if not line.startswith("(not shown")]  # the page has these columns
    shown = Text("\n".join(filter(None, (follower.verdict[0], follower.text, *lines))))
    shown.stylize("bold", 0, len(follower.verdict[0]))
    view.update(shown, refresh=True)


def say(text: str) -> None:
    print(f"paceline: watch: {text}", file=sys.stderr, flush=True)


def show_address(server: Server, browser: bool | None) -> None:
    """Print the address of the page, and open the page if `browser` is true, or is None and there is a display."""
    say(f"live page: {server.address}")
    has_display = bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")) or sys.platform == "darwin"
    if has_display if browser is None else browser:
        webbrowser.open(server.address)


def start_watching(folder: Path) -> None:
    """Watch from a separate process, which outlives this one."""
    command = [sys.executable, "-m", "paceline", "watch", str(folder)]
    subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, start_new_session=True)
