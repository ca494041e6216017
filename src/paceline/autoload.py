"""Called by torch on import (entry point `torch.backends`); does nothing unless one of these variables is set.

PACELINE_WRAPPER=1 replaces torch's wrapper with ours. PACELINE_ATTACH, which `paceline profile -- COMMAND` sets,
observes the training of this process. PACELINE_MONITOR=1 lets a monitor watch its ranks. An error would make `import
torch` fail, so this module raises none.
"""

import os

# The variable, the module that it needs, and the function there.
_CALLS = (
    ("PACELINE_WRAPPER", "paceline.parallel", "swap_wrapper"),
    ("PACELINE_ATTACH", "paceline.measure.observer", "attach"),
    ("PACELINE_MONITOR", "paceline.runtime.faults.monitored", "attach"),
)


def start() -> None:
    for variable, module, function in _CALLS:
        if os.environ.get(variable, "") not in ("", "0"):
            try:
                import importlib

                getattr(importlib.import_module(module), function)()
            except Exception as error:
                import sys

                found = f"{type(error).__name__}: {error}".partition("\n")[0]
                print(f"paceline: {variable} has no effect in this process: {found}", file=sys.stderr)
