"""Rows that only move on: one token computed, the next one decided, their end not in sight.

Their steps are planned and settled by operations over whole lists, so that a row costs the host
next to nothing until it needs a page or fills a unit of pages. It does not know budgets, pages or
why a row joins. While a request is in, only its `committed` tokens and its page table are up to
date; `leave` settles the rest.
"""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from operator import call
from typing import NamedTuple

from engine_service.core.request import Request
from engine_service.core.step import Span, SteadyRows, steady_span

_WORTH_FLIGHTS = 2
"""Fewer steps than that are not worth joining for."""

_exhaust: Callable[[Iterable[object]], None] = deque[object](maxlen=0).extend


class _Flight(NamedTuple):
    """A step's steady rows, in columns. `gone` are requests that left while it was in flight."""

    number: int
    keys: list[int]
    appends: list[Callable[[int], None]]
    steady: SteadyRows
    gone: list[Request]


class Straggler(NamedTuple):
    """A steady row of a step whose request left meanwhile, or has to be looked at."""

    request: Request
    span: Span
    token_id: int


class Landing(NamedTuple):
    """What a step did to its steady rows."""

    keys: list[int]
    """Requests to which nothing happened but that a token was appended ..."""
    token_ids: list[int]
    """... which one."""
    stragglers: list[Straggler]
    full: list[tuple[Request, int]]
    """Requests that filled a unit of pages, and how many of their positions are cached."""


_Calendar = defaultdict[int, dict[int, int]]
"""By the number of a flight keys and stints, no requests: those may be gone long before."""


class Convoy:
    """join, launch, land, leave.

    Flights are numbered from 1; a member decides position offset + n in flight n. What is due for a
    member stands in calendars by the number of a flight, with the stint it is about: members come
    and go.
    """

    def __init__(self, *, is_open: bool = True) -> None:
        """One that is not open takes nobody: members take part in every step."""
        self._is_open = is_open
        self.members: dict[int, Request] = {}
        self._rows: dict[int, int] = {}
        self._offsets: dict[int, int] = {}
        self._appends: dict[int, Callable[[int], None]] = {}
        self._joined: dict[int, int] = {}
        """Flights that were launched when a member joined: its stint."""
        self._ends: _Calendar = defaultdict(dict)
        """Behind this flight a member reaches its length."""
        self._end_of: dict[int, int] = {}
        """That flight by member."""
        self._lacking: _Calendar = defaultdict(dict)
        """For this flight a member needs another page."""
        self._full: _Calendar = defaultdict(dict)
        """With this flight a member fills a unit of pages."""
        self._stops: Counter[int] = Counter()
        """Stop tokens of all members, and of how many."""
        self._flights: deque[_Flight] = deque()
        self._launched = self._landed = 0

    def __len__(self) -> int:
        return len(self.members)

    @property
    def kv_tokens(self) -> int:
        """Positions of all members whose KV is in the pages, or is being computed."""
        return sum(self._offsets.values()) + self._launched * len(self.members)

    def num_cached(self, request: Request) -> int:
        """Leading positions of any request whose KV is final."""
        joined = self._joined.get(request.key, self._landed)
        if joined >= self._landed:
            return request.num_cached
        return self._offsets[request.key] + self._landed

    def join(self, request: Request, span: Span) -> bool:
        """Takes a request whose next span is `span`; False, and nothing is done, where that is not
        steady, or the request ends soon."""
        position = span.decide_start
        num_flights = request.max_len - position
        is_steady = self._is_open and span == steady_span(request.row, position)
        if num_flights < _WORTH_FLIGHTS or not is_steady:
            return False
        key = request.key
        self.members[key] = request
        self._rows[key] = request.row
        self._offsets[key] = position - self._launched - 1
        self._appends[key] = request.committed.append
        self._joined[key] = self._launched
        self._end_of[key] = self._launched + num_flights
        self._ends[self._end_of[key]][key] = self._launched
        self.note_page(request)
        self.note_unit(request)
        self._stops.update(request.stop_ids)
        return True

    def leave(self, request: Request) -> None:
        """Brings a request's own fields up to date and lets it go; nothing for others."""
        key = request.key
        if key not in self.members:
            return
        request.num_cached = self.num_cached(request)
        joined, offset = self._joined.pop(key), self._offsets.pop(key)
        del self.members[key], self._rows[key], self._appends[key]
        end = self._end_of.pop(key)
        if end in self._ends:  # it may be far ahead: who ends early would stay until then
            self._ends[end].pop(key, None)
            if not self._ends[end]:
                del self._ends[end]
        self._stops.subtract(request.stop_ids)
        self._stops += Counter()
        num_landed = max(0, self._landed - joined)
        if self._launched > joined:
            request.launched = steady_span(request.row, offset + self._launched)
        request.forward_passes += num_landed
        request.in_flight += self._launched - joined - num_landed
        request.look_ahead()
        for flight in self._flights:
            if flight.number > joined:
                flight.gone.append(request)

    def leave_ended(self) -> None:
        """Lets those go that have decided all they may."""
        for request in self._take(self._ends, self._launched):
            self.leave(request)

    def lacking(self) -> list[tuple[Request, int]]:
        """Members that need another page for the next flight, and the positions it must hold. One
        that got it is to be noted."""
        number = self._launched + 1
        due = self._take(self._lacking, number)
        return [(request, self._offsets[request.key] + number) for request in due]

    def note_page(self, request: Request) -> None:
        """Takes down when a member's pages will be full."""
        capacity = request.table.capacity
        if capacity < request.max_len:
            self._note(self._lacking, request, capacity + 1)

    def note_unit(self, request: Request) -> None:
        """Takes down when a member will have filled the unit of pages that is open."""
        if request.table.seal_at < request.max_len:
            self._note(self._full, request, request.table.seal_at)

    def launch(self) -> SteadyRows | None:
        """The members' next step; None without members."""
        if not self.members:
            return None
        self._launched += 1
        rows, offsets = list(self._rows.values()), list(self._offsets.values())
        steady = SteadyRows(rows, offsets, self._launched)
        appends = list(self._appends.values())
        self._flights.append(_Flight(self._launched, list(self.members), appends, steady, []))
        return steady

    def land(self, token_ids: Sequence[int]) -> Landing:
        """Appends the tokens of the oldest step in flight, one for each of its rows."""
        flight = self._flights[0]
        for request in self._take(self._ends, flight.number):
            self.leave(request)
        if not self._stops.keys().isdisjoint(token_ids):
            self._leave_at_stops(flight, token_ids)
        self._flights.popleft()
        self._landed += 1
        tokens = list(token_ids)
        stragglers = _take_out(flight, tokens) if flight.gone else []
        _exhaust(map(call, flight.appends, tokens))
        full = [
            (request, self.num_cached(request)) for request in self._take(self._full, flight.number)
        ]
        return Landing(flight.keys, tokens, stragglers, full)

    def _note(self, calendar: _Calendar, request: Request, position: int) -> None:
        """Due in the flight that decides `position`."""
        number = position - self._offsets[request.key]
        calendar[number][request.key] = self._joined[request.key]

    def _take(self, calendar: _Calendar, number: int) -> list[Request]:
        """Members for whom something is due in this flight."""
        joined, due = self._joined, calendar.pop(number, {})
        return [self.members[key] for key, stint in due.items() if joined.get(key) == stint]

    def _leave_at_stops(self, flight: _Flight, token_ids: Sequence[int]) -> None:
        for key, token in zip(flight.keys, token_ids, strict=True):
            if token in self._stops:
                request = self.members.get(key)
                if request is not None and token in request.stop_ids:
                    self.leave(request)


def _take_out(flight: _Flight, tokens: list[int]) -> list[Straggler]:
    """Takes the requests that left out of a flight's columns."""
    keys = flight.keys
    index_of = dict(zip(keys, range(len(keys)), strict=True))
    requests = {index_of[request.key]: request for request in flight.gone}
    stragglers = []
    for index in sorted(requests, reverse=True):
        span = flight.steady.span(index)
        stragglers.append(Straggler(requests[index], span, tokens[index]))
        del keys[index], flight.appends[index], tokens[index]
    return stragglers
