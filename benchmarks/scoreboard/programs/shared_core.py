"""Binds both ranks to the same core."""

import os

from loop import Program, main


class SharedCore(Program):
    title = "ranks bound to the same core"
    causes = ("shared cores",)

    def configure(self):
        if "LOCAL_RANK" in os.environ:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[self.rank % len(cores) if self.cured else 0]})


if __name__ == "__main__":
    main(SharedCore)
