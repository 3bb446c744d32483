"""Where kernels are kept that CuTe DSL compiles for FlashAttention 4 and QuACK.

By default the former keeps none, some 5 s of every start, and the latter below the folder for
temporary files, by the user's name, which a number without an account has not. It knows neither
library's kernels.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import MutableMapping
from pathlib import Path

_LOG = logging.getLogger("tidemill.rank")

_KEEPS = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED"
_FOLDERS = {
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": "flash-attention",
    "QUACK_CACHE_DIR": "quack",
}
"""Each library reads its variable when it is imported."""


def keep_compiled(environ: MutableMapping[str, str] = os.environ) -> None:
    """Call it before either is imported. What `environ` says stays; else kernels are kept in the
    user's cache folder, and nothing changes, with a warning, where nothing can be written there."""
    wanted = {name: folder for name, folder in _FOLDERS.items() if name not in environ}
    try:
        home = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        for folder in wanted.values():
            (home / "tidemill" / folder).mkdir(parents=True, exist_ok=True)
            # That it is there does not say that this user may write in it.
            with tempfile.NamedTemporaryFile(dir=home / "tidemill" / folder):
                pass
    except (OSError, RuntimeError) as error:  # RuntimeError: there is no home
        _LOG.warning("compiled kernels are not kept, set %s: %s", " and ".join(wanted), error)
        return
    for name, folder in wanted.items():
        environ[name] = str(home / "tidemill" / folder)
    environ.setdefault(_KEEPS, "1")
