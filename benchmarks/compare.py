"""Figures of `tidemill bench throughput --set` as one table, with a peer's beside them if given.

    python -m benchmarks.compare OURS.json ... [--peer PEER.json ...]

A set is matched by shape, number of GPUs, name, number format and sampling. Where ours were
measured on one GPU and on several, how much faster several are stands beside them. It measures
nothing.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple


class Key(NamedTuple):
    """What two rows must share to be compared."""

    shape: str
    gpus: int
    set: str
    dtype: str | None
    sampling: str


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table as Markdown; 1 when a file holds no sets."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.compare")
    parser.add_argument("ours", nargs="+", metavar="OURS.json", type=Path)
    parser.add_argument("--peer", nargs="+", default=[], metavar="PEER.json", type=Path)
    said = parser.parse_args(argv)
    ours, peers = _read(said.ours), _read(said.peer)
    for one in (*ours, *peers):
        if not one.get("sets"):
            print(f"{one['file']} holds no sets: measure with --set", file=sys.stderr)
            return 1
    gpus = {str(one.get("gpu")) for one in (*ours, *peers)}
    if len(gpus) > 1:
        print(f"measured on different devices: {', '.join(sorted(gpus))}", file=sys.stderr)
    settings = {f"{one.get('dtype')} at {_sampling(one)}" for one in (*ours, *peers)}
    if len(settings) > 1:
        print(
            "measured with different dtypes or sampling, of which only the same are compared: "
            + ", ".join(sorted(settings)),
            file=sys.stderr,
        )
    print("\n".join(table(ours, peers)))
    return 0


def _read(files: Iterable[Path]) -> list[dict[str, Any]]:
    return [json.loads(file.read_text()) | {"file": str(file)} for file in files]


def _sampling(result: dict[str, Any]) -> str:
    """The temperature, and the filters that are on."""
    off = {"top_k": 0, "top_p": 1.0}
    filters = [f"{name} {result[name]}" for name in off if result.get(name, off[name]) != off[name]]
    return ", ".join((str(result.get("temperature")), *filters))


def _rows(results: Iterable[dict[str, Any]]) -> Iterator[tuple[Key, dict[str, Any]]]:
    for result in results:
        name = str(result.get("shape") or result.get("model"))
        settings = result.get("dtype"), _sampling(result)
        for row in result["sets"]:
            yield Key(name, result.get("gpus", 1), row["set"], *settings), row


def table(ours: list[dict[str, Any]], peers: list[dict[str, Any]]) -> list[str]:
    """Lines of Markdown; `of bound` is bound / seconds, `ratio` the peer's seconds over ours, and
    `efficiency` the seconds of one GPU over those of all GPUs together."""
    theirs, alone = dict(_rows(peers)), dict(_rows(ours))
    is_scaled = any(key.gpus > 1 and key._replace(gpus=1) in alone for key in alone)
    engines = sorted({str(one.get("engine")) for one in peers})
    heads = ["shape", "GPUs", "set", "bound s", "seconds", "of bound", "tok/s in", "tok/s out"]
    heads += ["of one GPU", "efficiency"] if is_scaled else []
    heads += [f"{', '.join(engines)} s", "ratio"] if peers else []
    lines = [_line(heads), _line(["---"] * len(heads))]
    for key, row in _rows(ours):
        bound, ratio = row.get("bound_s"), row.get("bound_ratio")
        cells = [
            key.shape,
            str(key.gpus),
            key.set,
            "-" if bound is None else f"{bound:.3f}",
            f"{row['seconds']:.3f}",
            "-" if ratio is None else f"{ratio:.2f}",
            f"{row['prompt_tokens_per_s']:,.0f}",
            f"{row['output_tokens_per_s']:,.0f}",
        ]
        if is_scaled:
            cells += _scaling(row["seconds"], alone.get(key._replace(gpus=1)), key.gpus)
        if peers:
            peer = theirs.get(key)
            found = peer and [f"{peer['seconds']:.3f}", f"{peer['seconds'] / row['seconds']:.2f}x"]
            cells += found or ["-", "-"]
        lines.append(_line(cells))
    return lines


def _scaling(seconds: float, alone: dict[str, Any] | None, gpus: int) -> list[str]:
    if alone is None:
        return ["-", "-"]
    speedup = alone["seconds"] / seconds
    return [f"{speedup:.2f}x", f"{speedup / gpus:.2f}"]


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    sys.exit(main())
