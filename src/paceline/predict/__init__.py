"""Cost curves and, on them, predictions; called, it is `paceline.predict(profile, ...)`. Nothing here times anything.

The package has the name of a verb, so it can be called like one: `verbs.predict` does the work.
"""

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from paceline.verbs.predict import predict

        return predict(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
