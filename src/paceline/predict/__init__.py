"""Cost curves, and predictions built on them. Nothing here times anything.

The package shares its name with a verb, so calling it, as in `paceline.predict(profile, ...)`, runs `verbs.predict`.
"""

import sys
import types
from typing import Any


class _CallablePackage(types.ModuleType):
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        from paceline.verbs.predict import predict

        return predict(*args, **kwargs)


sys.modules[__name__].__class__ = _CallablePackage
