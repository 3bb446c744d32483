"""What all tests share: printed seeds, threads, and no way to a hub. It knows no room."""

import gc
import os
import random

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import hypothesis
import pytest
import torch

if not torch.cuda.is_available():
    # Before any kernel is defined: Triton then runs them as numpy programs.
    os.environ.setdefault("TRITON_INTERPRET", "1")

hypothesis.settings.register_profile(
    "house",
    deadline=None,
    print_blob=True,
    # Slow drawing says something about the machine, not about the test.
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("house")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--seed", type=int, default=None, help="Seed of the `seed` fixture.")


def pytest_configure(config: pytest.Config) -> None:
    if config.option.seed is None:
        config.option.seed = random.SystemRandom().randrange(2**31)


def pytest_report_header(config: pytest.Config) -> str:
    return f"seed: {config.option.seed} (repeat with --seed {config.option.seed})"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: item.get_closest_marker("long") is None)
    files = {item.path for item in items if item.get_closest_marker("slow")}
    if hidden := [str(file) for file in files if "mark.slow" not in file.read_text()]:
        raise pytest.UsageError(f"`make test-slow` looks for mark.slow, which is not in {hidden}")
    wanting = [item for item in items if item.get_closest_marker("gpu")]
    if wanting and not torch.cuda.is_available():
        for item in wanting:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def pytest_collection() -> None:
    """Nothing of what is imported goes; see below."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Python's cycle collector went through 9,000 tests and what they import over and over: a tenth
    of all that the processor did. What tests leave behind is looked for as before."""
    gc.enable()
    gc.collect()
    gc.freeze()


@pytest.fixture
def seed(request: pytest.FixtureRequest) -> int:
    """A fresh seed per run, printed in the header and with every failure."""
    print(f"--seed {request.config.option.seed}")
    return int(request.config.option.seed)
