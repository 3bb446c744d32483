"""A follower whose libraries come from slow storage, and which is refused what it is to load."""

from __future__ import annotations

import os
import sys
import time
from importlib.abc import MetaPathFinder
from typing import Any, NoReturn

from engine_service import follower
from tidemill.runtime.errors import NotFound

IMPORTED_S = 6.0


class SlowStorage(MetaPathFinder):
    def find_spec(self, name: str, *_: object) -> None:
        if name == "torch":
            time.sleep(IMPORTED_S)


def refuse(*_: Any, **__: Any) -> NoReturn:
    raise NotFound("nothing to load", param="model")


if __name__ == "__main__":
    sys.meta_path.insert(0, SlowStorage())
    os._exit(follower.main(sys.argv[1:], refuse))
