"""One of several ranks that each run the whole engine on the same requests, in step.

`python -m tests.equivalence.rank_main RANK SIZE FOLDER [STAGES]`: FOLDER holds cases.json and takes
what every rank finds as found-SIZE-STAGES-RANK.json; the ranks meet over a file in it.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from engine_service.composition import compose
from engine_service.config import EngineConfig
from engine_service.distributed import Place
from tests.equivalence.engine_runs import run


def tokens_of(case: dict[str, Any], place: Place, store: dist.Store | None, num_stages: int) -> Any:
    """What one engine of `place.size` ranks answers."""
    config = EngineConfig(
        **case["config"],
        tensor_parallel_size=place.size // num_stages,
        pipeline_parallel_size=num_stages,
    )
    engine = compose(config, lambda *stage: None, place, store)
    found = run(engine, case["prompts"], case["count"], case.get("knobs"), **case["sampling"])[0]
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


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), *map(int, sys.argv[4:]))
