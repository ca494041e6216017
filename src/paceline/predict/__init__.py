"""Cost curves, and predictions built on them. Nothing here times anything.

The package has the name of a verb, so calling it, as in `paceline.predict(profile, ...)`, calls `verbs.predict`.
"""

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from paceline.verbs.predict import predict

        return predict(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
