"""The rank process on a machine where torch is not installed."""

import sys
from importlib import import_module

if __name__ == "__main__":
    sys.modules["torch"] = None  # type: ignore[assignment]
    sys.exit(import_module("engine_service.rank").main(sys.argv[1:]))
