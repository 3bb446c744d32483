"""Where launching the layers of a step takes the host longer than computing them takes the device.

It does not know what is done about it: longer steps (resolve), captured canvases and
prompts (worker.buckets).
"""

from __future__ import annotations

LAUNCH_BOUND = 1024
"""Tokens that an 8B model computes for about as long as it is launched, on an H200."""
_WIDTH_OF_8B = 4096


def launch_bound(hidden_size: int) -> int:
    """Tokens that such a model computes for about as long as it is launched: a layer's computing
    grows with the square of its width, launching it does not."""
    return LAUNCH_BOUND * _WIDTH_OF_8B**2 // hidden_size**2
