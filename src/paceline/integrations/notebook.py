"""Notebooks: `%load_ext paceline` adds magics that start ranks and run cells on them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import IPython
from IPython.core.error import UsageError
from IPython.core.magic import Magics, cell_magic, line_magic, magics_class, no_var_expand
from IPython.core.magic_arguments import argument, magic_arguments, parse_argstring

from paceline.errors import ConfigError, LaunchError, PacelineError
from paceline.report.table import Column, Table
from paceline.runtime.notebooks.cell_ranks import CellRanks, RankLines, parse_ranks, runs_on_ranks
from paceline.runtime.notebooks.cells import CellSettings, Cleared, Output

_OLDEST = (8, 18)  # oldest supported version of IPython
_NO_RANKS = "no ranks are running: start two with %dist_init -n 2"
_COLUMNS = (
    Column("rank", "rank", "count", key="rank", is_key=True),
    Column("process", "pid", str, key="pid"),
    Column("device", "device", key="device"),
    Column("memory", "memory_bytes", "bytes", key="memory_bytes"),
    Column("GPU memory", "gpu_memory_bytes", "bytes", key="gpu_memory_bytes"),
    Column("state", "state", "words", key="state", is_key=True),
)


@magics_class
class RankMagics(Magics):
    """Magics for ranks. While ranks are running, cells without a magic run on all of them."""

    shell: Any

    def __init__(self, shell: Any) -> None:
        super().__init__(shell)
        self.ranks: CellRanks | None = None
        self._is_automatic = False
        self._lines = RankLines(self._write)

    # -- magics

    @magic_arguments()
    @argument("-n", "--num-processes", "--ranks", dest="num_ranks", type=int, default=0, help="number of ranks")
    @argument("-b", "--backend", default="auto", help="auto, gloo, shm or nccl")
    @argument("-d", "--device", default="auto", help="auto, cpu or cuda")
    @argument("-g", "--gpu-ids", default="", help="the GPU of each rank: 0,1")
    @argument("--threads", type=int, help="torch's threads per rank")
    @argument("-t", "--timeout", type=float, default=CellSettings.timeout_s, help="timeout of a collective in seconds")
    @argument("--explicit", action="store_true", help="run only cells with %%%%distributed or %%%%rank on ranks")
    @line_magic
    def dist_init(self, line: str) -> None:
        """Start ranks and run all following cells on them."""
        options = parse_argstring(self.dist_init, line)
        gpu_ids = tuple(_parse_gpu(part) for part in options.gpu_ids.split(",") if part.strip())
        device = "cuda" if gpu_ids and options.device == "auto" else options.device
        num_ranks = options.num_ranks or len(gpu_ids) or 2
        settings = CellSettings(num_ranks, options.backend, device, gpu_ids, options.threads, options.timeout)
        self._is_automatic = not options.explicit
        if self.ranks is not None and self.ranks.is_alive and self.ranks.settings == settings:
            self._say("these ranks are running already; start new ones with %dist_reset")
            return
        self._start(settings)

    @cell_magic
    @no_var_expand
    def distributed(self, line: str, cell: str) -> None:
        """%%distributed: run the cell on all ranks."""
        self._run(cell, None)

    @cell_magic
    @no_var_expand
    def rank(self, line: str, cell: str) -> None:
        """%%rank 0, %%rank [1,2], %%rank 0-3: run the cell on these ranks."""
        try:
            chosen = parse_ranks(line)
        except ConfigError as error:
            raise UsageError(str(error)) from None
        self._run(cell, chosen)

    @cell_magic
    @no_var_expand
    def local(self, line: str, cell: str) -> None:
        """%%local: run the cell in the notebook process."""
        was_automatic, self._is_automatic = self._is_automatic, False
        try:
            result = self.shell.run_cell(cell)
        finally:
            self._is_automatic = was_automatic
        result.raise_error()

    @line_magic
    def sync(self, line: str) -> None:
        """%sync: wait until every rank has reached this point."""
        ranks = self._need()
        self._run("world.barrier()", None)
        self._say(f"all {ranks.settings.num_ranks} ranks have reached this point")

    @line_magic
    def dist_mode(self, line: str) -> None:
        """%dist_mode on, off: choose whether cells without a magic run on all ranks."""
        word = {"-e": "on", "--enable": "on", "-d": "off", "--disable": "off"}.get(line.strip(), line.strip())
        if word not in ("", "on", "off"):
            raise UsageError(f"%dist_mode {word}: use on or off")
        self._is_automatic = self._is_automatic if not word else word == "on"
        where = "on all ranks" if self._is_automatic and self.ranks is not None else "in the notebook's own process"
        self._say(f"cells without a magic run {where}")

    @line_magic
    def dist_status(self, line: str) -> None:
        """%dist_status: show state, device and memory of every rank."""
        if self.ranks is None:
            self._say(_NO_RANKS)
            return
        table = Table("ranks", "", _COLUMNS, self.ranks.status())
        self.shell.display_pub.publish({"text/plain": table.terminal(), "text/html": table.html()})

    @line_magic
    def dist_reset(self, line: str) -> None:
        """%dist_reset: terminate the ranks and start new ones, with an empty namespace."""
        self._start(self._need().settings)

    @line_magic
    def dist_shutdown(self, line: str) -> None:
        """%dist_shutdown: terminate the ranks; cells run in the notebook process again."""
        ranks, self.ranks = self.ranks, None
        if ranks is not None:
            ranks.close()
            self._say(f"{ranks.settings.num_ranks} ranks ended")

    # -- shared by the magics

    def _need(self) -> CellRanks:
        if self.ranks is None:
            raise UsageError(_NO_RANKS)
        return self.ranks

    def _start(self, settings: CellSettings) -> None:
        before, self.ranks = self.ranks, None
        if before is not None:
            before.close()
        try:
            ranks = CellRanks(settings, self._show, self._notice)
            text = ranks.start()
        except PacelineError as error:
            raise _as_one_line(error) from None
        self.ranks = ranks
        where = "Cells run on all of them; %%rank 0 runs a cell on rank 0, %%local in the notebook."
        self._say(f"{text}. {where if self._is_automatic else '%%distributed runs a cell on all of them.'}")

    def _run(self, cell: str, chosen: Sequence[int] | None) -> None:
        ranks = self._need()
        try:
            ranks.run(cell, chosen, f"In[{self.shell.execution_count}]")
        except (ConfigError, LaunchError) as error:
            raise _as_one_line(error) from None
        finally:
            self._lines.close()

    def transform(self, lines: list[str]) -> list[str]:
        """Rewrite `%%rank[0]` as a magic with an argument and add a magic to cells without one."""
        source = "".join(lines)
        if source.lstrip().startswith("%%rank["):
            return source.replace("%%rank[", "%%rank [", 1).splitlines(keepends=True)
        if self.ranks is not None and self._is_automatic and runs_on_ranks(source):
            return ["%%distributed\n", *lines]
        return lines

    # -- output

    def _show(self, rank: int, message: Any) -> None:
        if isinstance(message, Output):
            self._lines.add(rank, message.stream, message.text)
        elif isinstance(message, Cleared):
            self._lines.close()
            self.shell.display_pub.clear_output(wait=message.wait)
        elif set(message.data) == {"text/plain"} and not message.transient:
            self._lines.close()
            self._lines.add(rank, "stdout", message.data["text/plain"] + "\n")
        else:
            if not message.update:
                self._lines.close()
                self._lines.add(rank, "stdout", "\n")
            self.shell.display_pub.publish(**vars(message))

    def _write(self, stream: str, text: str) -> None:
        file = sys.stderr if stream == "stderr" else sys.stdout
        file.write(text)
        file.flush()

    def _say(self, text: str, stream: str = "stdout") -> None:
        self._lines.close()
        self._write(stream, f"paceline: {text}\n")

    def _notice(self, text: str) -> None:
        """Show an important message; notebooks show stderr in red."""
        self._say(text, "stderr")


def _parse_gpu(text: str) -> int:
    if not text.strip().isdigit():
        raise UsageError(f"%dist_init --gpu-ids: {text!r} is not a GPU number; write 0,1")
    return int(text)


def _as_one_line(error: PacelineError) -> PacelineError:
    """Let IPython show the message instead of our own frames."""
    if not hasattr(error, "_render_traceback_"):
        error._render_traceback_ = lambda: [f"{type(error).__name__}: {error}"]  # type: ignore[attr-defined]
    return error


def load(shell: Any) -> None:
    if getattr(shell, "paceline_magics", None) is not None:
        return
    if IPython.version_info < _OLDEST:
        text = f"IPython {IPython.__version__} is installed, but {'.'.join(map(str, _OLDEST))} or later is required"
        raise _as_one_line(ConfigError(f"{text}: pip install 'paceline[notebook]'", code="missing-extra"))
    shell.paceline_magics = magics = RankMagics(shell)
    shell.register_magics(magics)
    shell.input_transformers_cleanup.append(magics.transform)


def unload(shell: Any) -> None:
    magics, shell.paceline_magics = getattr(shell, "paceline_magics", None), None
    if magics is not None:
        shell.input_transformers_cleanup.remove(magics.transform)
        magics.dist_shutdown("")
