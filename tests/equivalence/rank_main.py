"""Several ranks that each run the whole engine on the same requests, in step.

`python -m tests.equivalence.rank_main GROUPS`: for each [FOLDER, SIZE, STAGES] of the JSON, one
behind the other. FOLDER holds cases.json and takes what every rank finds, and prints, as
found-SIZE-STAGES-RANK.json and log-SIZE-STAGES-RANK; the ranks meet over a file in it.

They are forked: importing torch takes a process as long as answering all of its cases.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import engine_service.parts  # noqa: F401 - every rank would import it for itself
from engine_service.child import die_with
from engine_service.composition import compose
from engine_service.config import EngineConfig
from engine_service.place import Place
from tests.equivalence.engine_runs import run

FORK = multiprocessing.get_context("fork")


def tokens_of(case: dict[str, Any], place: Place, store: dist.Store | None, num_stages: int) -> Any:
    """What one engine of `place.size` ranks answers."""
    config = EngineConfig(
        **case["config"],
        tensor_parallel_size=place.size // num_stages,
        pipeline_parallel_size=num_stages,
    )
    engine = compose(config, lambda *stage: None, place, store)
    found, _ = run(engine, case["prompts"], case["count"], case["knobs"], case["sampling"])
    engine.close()
    return found


def main(rank: int, size: int, folder: Path, num_stages: int = 1) -> None:
    torch.set_num_threads(1)
    cases = json.loads((folder / "cases.json").read_text())
    store = dist.FileStore(str(folder / f"store-{size}-{num_stages}"), size)
    found = []
    for index, case in enumerate(cases):
        print(index, case["config"]["model"], flush=True)
        own = dist.PrefixStore(str(index), store)
        place = Place(rank, size, local_rank=rank)
        found.append(tokens_of(case, place, own, num_stages))
        if size > 1:
            dist.destroy_process_group()
    (folder / f"found-{size}-{num_stages}-{rank}.json").write_text(json.dumps(found))


def rank_of(parent: int, rank: int, size: int, folder: Path, num_stages: int) -> None:
    """In a process of its own, with what it imports and prints."""
    die_with(parent)
    with (folder / f"log-{size}-{num_stages}-{rank}").open("w") as log:
        os.dup2(log.fileno(), sys.stdout.fileno())
        os.dup2(log.fileno(), sys.stderr.fileno())
    main(rank, size, folder, num_stages)


def group(folder: Path, size: int, num_stages: int) -> None:
    """Runs its ranks to their end."""
    shared = (size, folder, num_stages)
    ranks = [FORK.Process(target=rank_of, args=(os.getpid(), at, *shared)) for at in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    codes = [rank.exitcode for rank in ranks]
    if any(codes):
        logs = [folder / f"log-{size}-{num_stages}-{rank}" for rank in range(size)]
        sys.exit(f"{codes}\n" + "".join(log.read_text()[-3000:] for log in logs))


if __name__ == "__main__":
    for folder, *sizes in json.loads(sys.argv[1]):
        group(Path(folder), *sizes)
