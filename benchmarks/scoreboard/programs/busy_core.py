"""Another process keeps the core of rank 1 busy."""

import os
import subprocess
import sys

from loop import Program, main


class BusyCore(Program):
    title = "core shared with another process"
    causes = ("shared cores", "late rank")
    culprit = 1

    def configure(self):
        if "LOCAL_RANK" in os.environ:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[self.rank % len(cores)]})
            if self.is_ailing_here:
                spinning = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"
                subprocess.Popen([sys.executable, "-c", spinning])


if __name__ == "__main__":
    main(BusyCore)
