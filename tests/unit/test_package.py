"""What `import tidemill` gives, and what it does not load."""

import subprocess
import sys

import pytest

import tidemill

STAR = """
import sys
import tidemill
assert "torch" not in sys.modules and "tidemill.llm" not in sys.modules
from tidemill import *
print(sorted(name for name in globals() if not name.startswith("__") and name != "sys"))
"""


def test_a_star_brings_what_users_import_and_no_modules() -> None:
    ran = subprocess.run([sys.executable, "-c", STAR], capture_output=True, text=True, check=True)
    assert ran.stdout.strip() == str(sorted([*tidemill.__all__, "tidemill"]))


def test_every_name_is_there_and_no_other() -> None:
    for name in tidemill.__all__:
        assert getattr(tidemill, name).__name__ == name
    with pytest.raises(AttributeError, match="no attribute 'OtherParams'"):
        _ = tidemill.OtherParams
