"""Engines of several ranks that move KV between each other answer as one engine of one rank does,
however many ranks and stages either has."""

from __future__ import annotations

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from engine_service.server import launch, transfer_out
from engine_service.server.launch import EngineServer
from tests.equivalence.shapes import SHAPES, VOCAB
from tests.equivalence.test_kv_transfer import make, run
from tests.equivalence.test_rank_group import ROOT
from tests.equivalence.test_rank_hosts import arguments
from tests.service.distant_ranks import TOKEN
from tests.service.engine_fixtures import stubs
from tests.service.test_kv_transfer import PAGE, address, answer, asking, engines, is_free, moved
from tests.waiting import PATIENCE_S, free_port, until

LENGTHS = (PAGE + 1, 2 * PAGE + 9, 3 * PAGE + 5, 7 * PAGE + 3)
SWAPPED = "tests.equivalence.swapped_shares"


def flags(role: str, size: int = 1, num_stages: int = 1, **more: Any) -> dict[str, Any]:
    grid = {"tensor_parallel_size": size, "pipeline_parallel_size": num_stages}
    patient = {"kv_transfer_timeout_s": 3 * PATIENCE_S, "log_level": "warning"}
    return {"role": role, "device": "cpu", **patient, **grid, **more}


class Case:
    """A model in a folder, prompts, and what an engine of one rank answers to them."""

    def __init__(self, folder: Path, name: str, **changes: Any) -> None:
        self.config = {**SHAPES[name].config, **changes}
        (folder / "config.json").write_text(json.dumps(self.config))
        rng = random.Random(name)
        self.prompts = [[rng.randrange(VOCAB - 8) for _ in range(count)] for count in LENGTHS]
        one = make(folder, name, "both", max_model_len=256)
        self.right = [run(one, prompt, max_tokens=8)[0] for prompt in self.prompts]

    @property
    def page_bytes(self) -> int:
        sizes = ("num_hidden_layers", "num_key_value_heads", "head_dim")
        layers, heads, width = (self.config[name] for name in sizes)
        return int(layers * 2 * PAGE * heads * width * 4)

    async def ask(self, source: EngineServer, target: EngineServer, salt: str) -> list[list[int]]:
        """All prompts at once, so that steps and transfers of both engines mix; checks that the
        prompts' pages have been moved."""
        counts, size = moved(target, "kv_transfers"), moved(target, "kv_transfer_bytes")
        async with stubs(target) as here:
            found = await asyncio.gather(
                *(
                    answer(here, asking(prompt, address(source), cache_salt=salt))
                    for prompt in self.prompts
                )
            )
        for one in (source, target):
            await until(lambda one=one: is_free(one))
        whole = [(len(prompt) - 1) // PAGE * PAGE for prompt in self.prompts]
        assert [cached for _, cached in found] == whole
        done = moved(target, "kv_transfers")
        assert done == {"done": counts.get("done", 0) + len(self.prompts)}
        came = sum(moved(target, "kv_transfer_bytes").values()) - sum(size.values())
        assert came == sum(whole) // PAGE * self.page_bytes
        return [tokens for tokens, _ in found]


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("name", "changes", "sources", "targets"),
    [
        ("qwen3", {}, [(2, 1), (1, 1)], [(1, 2), (2, 1)]),
        # One head for two ranks, and one layer more in the first stage.
        ("sdar", {"num_key_value_heads": 1}, [(1, 2), (2, 2)], [(1, 1), (2, 1)]),
    ],
)
async def test_every_pair_of_grids_answers_as_one_rank(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    changes: dict[str, Any],
    sources: list[tuple[int, int]],
    targets: list[tuple[int, int]],
) -> None:
    """`sources` and `targets`: (tensor_parallel_size, pipeline_parallel_size) of each engine."""
    case = Case(tmp_path, name, **changes)
    monkeypatch.setattr(transfer_out, "PIECE_BYTES", 2 * case.page_bytes)
    flagged = [flags("prefill", *grid) for grid in sources]
    flagged += [flags("decode", *grid) for grid in targets]
    async with engines(tmp_path, *flagged) as servers:
        for number, source in enumerate(servers[: len(sources)]):
            for target in servers[len(sources) :]:
                target.desk.fetches._host = (target.desk.fetches._host, "")[number]
                assert await case.ask(source, target, f"{number}") == case.right
        connectors = [set(moved(one, "kv_transfer_bytes")) for one in servers]
        assert set.union(*connectors) == {"grpc", "shm"}


@pytest.mark.timeout(300)
async def test_shares_of_other_ranks_give_other_tokens(tmp_path: Path) -> None:
    """The control: heads in another order."""
    case = Case(tmp_path, "qwen3")
    pair = flags("prefill", 2, rank_module=SWAPPED), flags("decode")
    async with engines(tmp_path, *pair) as (source, target):
        found = await case.ask(source, target, "swapped")
    assert [len(tokens) for tokens in found] == [8] * len(LENGTHS)
    assert found != case.right


@contextmanager
def second_host(folder: Path, asked: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Runs the other half of an engine's ranks as on another host; gives the engine's flags."""
    token = folder / "token"
    token.write_text(TOKEN)
    where = {"leader_address": f"127.0.0.1:{free_port()}", "group_token_file": str(token)}
    every = {**asked, **where, "nnodes": 2}
    sizes = {"max_rows": 4, "page_size": PAGE, "num_pages": 200}
    told = {"load_format": "dummy", "seed": 3, **sizes, **every, "node_rank": 1}
    command = [sys.executable, "-m", "engine_service", str(folder), *arguments(told)]
    node = subprocess.Popen(command, cwd=ROOT)
    try:
        yield every
        assert node.wait(PATIENCE_S) == 0
    finally:
        node.kill()
        node.wait()


@pytest.mark.timeout(300)
async def test_ranks_of_other_hosts_hand_over_and_keep_their_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A rank 0 that is killed on a busy machine is a lost host to the others, and no clean end.
    monkeypatch.setattr(launch, "_LEAVING_S", PATIENCE_S)
    case = Case(tmp_path, "qwen3")
    with (
        second_host(tmp_path, flags("prefill", 2)) as there,
        second_host(tmp_path, flags("decode", 1, 2)) as here,
    ):
        async with engines(tmp_path, there, here) as (source, target):
            assert await case.ask(source, target, "far") == case.right
