"""Sizing of the KV pool: what fits, and what an operator is told when nothing does."""

from __future__ import annotations

import resource

import pytest
import torch

from engine_service.attention.base import AttentionShape
from engine_service.attention.select import create_backend
from engine_service.config import EngineConfig
from engine_service.worker import memory
from engine_service.worker.kv_pool import KVPool, KVRoom, count_pages, page_bytes
from tidemill.runtime.errors import InvalidRequest

SHAPE = AttentionShape(num_heads=4, num_kv_heads=2, head_dim=8, page_size=16, dtype=torch.bfloat16)


def room(available: int) -> KVRoom:
    return KVRoom(available_bytes=available, advice=lambda needed: f"--cpu-kv-bytes {needed}")


def count(available: int, requested: int | None = None, *, per_row: int = 4, rows: int = 8) -> int:
    return count_pages(
        room(available),
        requested=requested,
        bytes_per_page=1000,
        pages_per_row=per_row,
        page_size=16,
        max_rows=rows,
    )


def test_page_bytes_count_keys_and_values_of_all_layers():
    assert page_bytes(SHAPE, 3) == 2 * 3 * 16 * 2 * 8 * 2


@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_pool_has_one_trash_page_and_the_counted_bytes(name):
    pool = KVPool(create_backend(name, SHAPE), 3, 5, torch.device("cpu"))
    assert pool.trash_page == 5
    assert len(pool.caches) == 3
    for cache in pool.caches:
        assert tuple(cache.k.shape) == tuple(cache.v.shape) == (6, 16, 2, 8)
    total = sum(cache.k.nbytes + cache.v.nbytes for cache in pool.caches)
    assert total == 6 * page_bytes(SHAPE, 3)


def test_pool_takes_the_room_but_no_more_than_all_rows_can_use():
    assert count(10_500) == 9  # one page is the trash page
    assert count(10**9) == 32
    assert count(0, requested=7) == 7


def test_too_little_memory_names_need_room_length_and_flags():
    with pytest.raises(InvalidRequest) as caught:
        count(3_999)
    error = caught.value
    assert error.reason == "KV_POOL_TOO_SMALL"
    assert error.param == "max_model_len"
    assert error.facts == {
        "needed_bytes": "5000",
        "available_bytes": "3999",
        "estimated_max_model_len": "32",
    }
    assert "--cpu-kv-bytes 5000" in error.message
    assert "--max-model-len 32" in error.message
    assert count(5000) == 4  # what the message advises is enough
    assert count(3_999, per_row=2) == 2


def test_too_few_requested_pages_name_the_flag():
    with pytest.raises(InvalidRequest, match="--num-pages 4, or --max-model-len 48") as caught:
        count(10**9, requested=3)
    assert caught.value.param == "num_pages"


def test_nothing_left_at_all_gives_no_impossible_advice():
    with pytest.raises(InvalidRequest) as caught:
        count(-5)
    assert "--max-model-len" not in caught.value.message
    assert caught.value.facts["available_bytes"] == "0"


def test_cuda_room_subtracts_use_and_peak():
    got = memory._cuda_room(0.9, free=70, total=100, peak=15)
    assert got.available_bytes == 90 - 30 - 15
    assert got.advice(46) == "--memory-fraction 0.91"
    assert "larger device" in got.advice(80)


@pytest.mark.parametrize(("ram", "expected"), [(10_000, 4_000), (2_000, 1_800)])
def test_cpu_room_is_the_bound_or_free_ram(monkeypatch, ram, expected):
    monkeypatch.setattr(memory, "free_ram", lambda: ram)
    got = memory._cpu_room(EngineConfig(cpu_kv_bytes=4_000))
    assert got.available_bytes == expected
    assert "5000" in got.advice(5000)


def test_files_that_were_read_are_free_ram_of_a_container(tmp_path, monkeypatch):
    monkeypatch.setattr(memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(memory, "_machine_ram", lambda: 10_000)
    assert memory.free_ram() == 10_000, "there is no container"
    (tmp_path / "memory.max").write_text("5000\n")
    (tmp_path / "memory.current").write_text("4900\n")
    (tmp_path / "memory.stat").write_text(
        "anon 2000\ninactive_file 700\nactive_file 1300\nslab 1\n"
    )
    assert memory.free_ram() == 5000 - (4900 - 2000)
    (tmp_path / "memory.current").write_text("9000\n")
    assert memory.free_ram() == 0
    (tmp_path / "memory.max").write_text("max\n")
    assert memory.free_ram() == 10_000


def test_free_ram_is_plausible():
    assert 0 < memory.free_ram() < 1 << 50


def resident_bytes(pages: torch.Tensor) -> int:
    """Bytes of `pages` that have memory behind them, by the kernel's own page table.

    The process's resident size would count what other threads take meanwhile. An entry has eight
    bytes; its highest bit says that the page is present (proc_pid_pagemap(5)).
    """
    unit = resource.getpagesize()
    first = pages.data_ptr() // unit
    last = (pages.data_ptr() + pages.nbytes - 1) // unit
    with open("/proc/self/pagemap", "rb") as table:
        table.seek(8 * first)
        entries = table.read(8 * (last - first + 1))
    return unit * sum(flags >> 7 for flags in entries[7::8])


@pytest.mark.parametrize("name", ["sdpa", "reference"])
def test_pages_of_a_cpu_are_zeros_that_take_no_memory_before_they_are_written(name: str) -> None:
    pool = KVPool(create_backend(name, SHAPE), 2, 128 << 10, torch.device("cpu"))
    size = pool.k.nbytes + pool.v.nbytes
    assert size > 256 << 20
    assert resident_bytes(pool.k) + resident_bytes(pool.v) == 0
    assert not pool.k[:, -3:].any()
    pool.v[1] = 1.0  # the control
    assert resident_bytes(pool.v) >= pool.v[1].nbytes
