"""`python -m engine_service.device_count`: prints how many CUDA devices engines started from here
would see, by the rules of the library that they compute with.

A process of its own, so that whoever only starts engines need not hold that library in memory.
"""

from __future__ import annotations

import torch

if __name__ == "__main__":
    print(torch.cuda.device_count() if torch.cuda.is_available() else 0)
