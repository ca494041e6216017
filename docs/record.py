#!/usr/bin/env python
"""Record a command in a terminal of 80 columns, as a text cast and an animated SVG.

    docs/record.py demo -- paceline demo      # writes docs/recordings/demo.cast and demo.svg
    docs/record.py demo                       # only draws demo.svg again

The cast is in the format of asciinema (version 2). Waits are shortened to a second in the SVG, which shows its last
frame if the reader prefers reduced motion.
"""

from __future__ import annotations

import fcntl
import html
import json
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "recordings"
COLUMNS, ROWS = 80, 50
LONGEST_S, LAST_S, LEAST_S = 1.0, 8.0, 0.12  # of a wait, of the last frame, and between two frames
WIDTH, HEIGHT, MARGIN = 8.4, 18, 14  # of a character, of a line, and around the text
_PIECES = re.compile(r"\x1b\[([\d;?]*)([A-Za-z])|\x1b[^\[]|([\r\n\b])|([^\x1b\r\n\b]+)")


class Screen:
    """The text on a terminal. Understands what progress bars print, and ignores colors."""

    def __init__(self) -> None:
        self.lines: list[str] = [""]
        self._row = self._column = 0

    def write(self, text: str) -> None:
        for number, code, control, words in _PIECES.findall(text):
            count = int(number) if number.isdigit() else 1
            if control == "\n":
                self._row += 1
                self._column = 0
            elif control == "\r":
                self._column = 0
            elif control == "\b":
                self._column = max(0, self._column - 1)
            elif code == "A":
                self._row = max(0, self._row - count)
            elif code == "B":
                self._row += count
            elif code == "K":
                kept = self._get_line()[: 0 if number == "2" else self._column]
                self.lines[self._row] = kept
            elif words:
                line = self._get_line().ljust(self._column)
                self.lines[self._row] = line[: self._column] + words + line[self._column + len(words) :]
                self._column += len(words)

    def _get_line(self) -> str:
        self.lines += [""] * (self._row + 1 - len(self.lines))
        return self.lines[self._row]

    @property
    def shown(self) -> list[str]:
        wrapped = [line[k : k + COLUMNS] for line in self.lines for k in range(0, max(1, len(line)), COLUMNS)]
        return [line.rstrip() for line in wrapped][-ROWS:]


def record(command: Sequence[str]) -> list[Any]:
    """The header and the events of a cast."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    variables = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    variables |= {"TERM": "xterm-256color", "NO_COLOR": "1"}
    begin_s = time.monotonic()
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=variables)
    os.close(theirs)
    events = []
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # the terminal has closed
            break
        if not data:
            break
        events.append([round(time.monotonic() - begin_s, 2), "o", data.decode(errors="replace")])
    os.close(ours)
    if process.wait():
        raise SystemExit(f"{shlex.join(command)} failed")
    return [{"version": 2, "width": COLUMNS, "height": ROWS, "command": shlex.join(command)}, *events]


def list_frames(cast: Sequence[Any]) -> Iterator[tuple[float, list[str]]]:
    """Each distinct state of the screen, with its duration in the animation."""
    header, *events = cast
    screen, shown, shown_s = Screen(), [f"$ {header['command']}"], 0.0
    screen.write(shown[0] + "\n")
    for at_s, _, text in events:
        screen.write(text)
        if (found := screen.shown) != shown and at_s - shown_s >= LEAST_S:
            yield min(LONGEST_S, at_s - shown_s), shown
            shown, shown_s = found, at_s
    if shown != screen.shown:
        yield LEAST_S, shown
    yield LAST_S, screen.shown


def render_svg(cast: Sequence[Any]) -> str:
    frames = list(list_frames(cast))
    total_s, rows = sum(seconds for seconds, _ in frames), max(len(lines) for _, lines in frames)
    width, height = round(2 * MARGIN + COLUMNS * WIDTH), round(2 * MARGIN + rows * HEIGHT)
    styles, groups, at_s = [], [], 0.0
    for number, (seconds, lines) in enumerate(frames):
        begin, end = (100 * moment_s / total_s for moment_s in (at_s, at_s + seconds))
        is_last = number == len(frames) - 1
        first = "" if number == 0 else f"0%{{visibility:hidden}}{begin:.2f}%{{visibility:visible}}"
        first = first or "0%{visibility:visible}"
        styles.append(f"@keyframes k{number}{{{first}{'' if is_last else f'{end:.2f}%{{visibility:hidden}}'}}}")
        styles.append(f"#f{number}{{animation-name:k{number}}}")
        texts = [
            f'<text x="{MARGIN}" y="{MARGIN + HEIGHT * (row + 0.75):g}">{html.escape(line)}</text>'
            for row, line in enumerate(lines)
            if line
        ]
        groups.append(f'<g class="f{" last" * is_last}" id="f{number}">{"".join(texts)}</g>')
        at_s += seconds
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">\n'
        f"<title>{html.escape(cast[0]['command'])}</title>\n<style>"
        f"text{{font:14px ui-monospace,'DejaVu Sans Mono',Menlo,Consolas,monospace;fill:#e7e9ed;white-space:pre}}"
        f".f{{visibility:hidden;animation:{total_s:.2f}s steps(1) infinite}}\n{chr(10).join(styles)}\n"
        "@media (prefers-reduced-motion:reduce){.f{animation:none}.last{visibility:visible}}</style>\n"
        f'<rect width="100%" height="100%" rx="8" fill="#15171b"/>\n{chr(10).join(groups)}\n</svg>\n'
    )


def load_cast(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def main() -> None:
    if len(sys.argv) < 2 or sys.argv[2:3] not in ([], ["--"]):
        raise SystemExit(__doc__)
    path, command = FOLDER / f"{sys.argv[1]}.cast", sys.argv[3:]
    if command:
        FOLDER.mkdir(exist_ok=True)
        lines = map(json.dumps, record(command))
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    path.with_suffix(".svg").write_text(render_svg(load_cast(path)), encoding="utf-8")


if __name__ == "__main__":
    main()
