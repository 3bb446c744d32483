"""Steps read the host's pages, whenever the device is told of them."""

import random

import numpy as np
import pytest
import torch

from engine_service.core.step import PageAppend
from engine_service.kernels.page_lines import page_lines
from engine_service.staging import stage
from engine_service.worker.page_table import PageTable

CPU = torch.device("cpu")
NUM_ROWS, NUM_PAGES, TRASH = 6, 9, 99


def make_table(*, tells_late: bool | None = True) -> PageTable:
    return PageTable(NUM_ROWS, NUM_PAGES, TRASH, CPU, tells_late=tells_late)


def lines_of(table: PageTable, rows: list[int]) -> torch.Tensor:
    """What a step of these rows reads."""
    late = table.late_of(np.array(rows))
    assert late is not None
    entries, pages = map(torch.from_numpy, late)
    return page_lines(table.on_device, torch.tensor(rows), entries, pages, NUM_PAGES)


class Requests:
    """What a scheduler may do with rows: admit, grow by some pages, run some of them, leave."""

    def __init__(self, table: PageTable, seed: int) -> None:
        self.table, self.rng = table, random.Random(seed)
        self.lengths = dict[int, int]()
        self.num_read = 0

    def turn(self) -> bool:
        """One step; whether it reads what the host holds."""
        rng, table, appends = self.rng, self.table, list[PageAppend]()
        for row in range(NUM_ROWS):
            if rng.random() < (0.05 if row in self.lengths else 0.5):
                self.lengths[row] = 0
                table.forget(row)
            while row in self.lengths and rng.random() < 0.4:
                index = self.lengths[row]
                pages = tuple(rng.randrange(90) for _ in range(rng.choice([1, 1, 1, 2])))
                if index + len(pages) > NUM_PAGES:
                    del self.lengths[row]
                    break
                self.lengths[row] += len(pages)
                appends.append(PageAppend(row, index, pages))
        rng.shuffle(appends)
        table.append(sorted(appends, key=lambda one: one.index))
        rows = [row for row, length in self.lengths.items() if length and rng.random() < 0.6]
        rng.shuffle(rows)
        if not rows:
            return True
        self.num_read += len(rows)
        is_same = lines_of(table, rows).tolist() == table.on_host[rows].tolist()
        table.told(np.array(rows))
        return is_same


def count_writes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    counts = list[int]()

    def counted(arrays: list[np.ndarray], device: torch.device) -> list[torch.Tensor]:
        counts.append(len(arrays[0]))
        return stage(arrays, device)

    monkeypatch.setattr("engine_service.worker.page_table.stage", counted)
    return counts


def test_steps_read_what_the_host_holds(seed: int) -> None:
    requests = Requests(make_table(), seed)
    assert all(requests.turn() for _ in range(300))
    assert requests.num_read > 300


def test_control_who_does_not_read_late_pages_reads_others(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(make_table(), seed)
    monkeypatch.setattr(
        "tests.unit.test_page_table.page_lines", lambda lines, rows, *_, **__: lines[rows]
    )
    assert not all(requests.turn() for _ in range(300))


def test_a_row_that_decodes_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its first pages at once, as another one's still stand there; those that follow with steps."""
    counts, table = count_writes(monkeypatch), make_table()
    table.forget(2)
    table.append([PageAppend(2, 0, (7,))])
    for index in range(1, NUM_PAGES):
        table.append([PageAppend(2, index, (index,))])
        assert table.on_device[2, index] == TRASH
        assert lines_of(table, [2])[0, index] == index
        table.told(np.array([2]))
    assert counts == [1]
    assert table.on_device[2].tolist() == [7, *range(1, NUM_PAGES)]


def test_a_page_whose_step_does_not_come_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, table = count_writes(monkeypatch), make_table()
    table.append([PageAppend(1, 0, (3,))])
    table.append([PageAppend(1, 1, (4,))])
    table.told(np.array([0, 2]))  # steps of others
    table.append([PageAppend(1, 2, (5,))])
    assert table.on_device[1, :4].tolist() == [3, 4, 5, TRASH]
    assert counts == [1, 1]


def test_on_a_cpu_all_is_written_at_once() -> None:
    table = make_table(tells_late=None)
    table.append([PageAppend(1, 0, (3,))])
    table.append([PageAppend(1, 1, (4,))])
    assert table.on_device.tolist() == table.on_host.tolist()
    assert table.late_of(np.array([1])) is None
