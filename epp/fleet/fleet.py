"""The endpoints we may route to, kept equal to what discovery last said.

`apply` is level-triggered: it takes the whole truth, works out the difference itself and tells the listeners, so a lost
or reordered notification of some source cannot leave an endpoint behind. Everything here runs on the event loop's
thread. How an endpoint is loaded, scraped or indexed is the listeners' affair.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from epp.fleet.endpoint import Endpoint, EndpointSpec

logger = logging.getLogger(__name__)


class FleetListener(Protocol):
    """Wants to know each endpoint from its first to its last moment. Called on the event loop's thread; must not
    block. What it raises is logged and harms nobody else."""

    def endpoint_added(self, endpoint: Endpoint) -> None: ...

    def endpoint_removed(self, endpoint: Endpoint) -> None: ...

    def endpoint_updated(self, endpoint: Endpoint) -> None:
        """Same endpoint, new `spec`: labels, metrics or event addresses changed."""


class Slots:
    """Small dense integers: the lowest free one first, so that lists indexed by slot stay as short as the fleet."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self._next = 0

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self._next += 1
        return self._next - 1

    def give_back(self, slot: int) -> None:
        heapq.heappush(self._free, slot)


class Fleet:
    def __init__(self) -> None:
        self._by_address: dict[str, Endpoint] = {}
        self._by_host: dict[str, list[Endpoint]] = {}
        self._endpoints: tuple[Endpoint, ...] = ()
        self._candidates: tuple[Endpoint, ...] = ()
        self._slots = Slots()
        self._listeners: list[FleetListener] = []
        self.synced = False
        """Discovery has delivered at least once (an empty fleet counts)."""

    def __repr__(self) -> str:
        return f"<Fleet of {len(self._endpoints)}, synced={self.synced}>"

    @property
    def endpoints(self) -> Sequence[Endpoint]:
        """By slot. The same object until something is added, removed or updated: its identity may be a cache key."""
        return self._endpoints

    def get(self, address: str) -> Endpoint | None:
        return self._by_address.get(address)

    def at(self, ip: str) -> Sequence[Endpoint]:
        """All endpoints of an IP, whether or not requests may go there."""
        return self._by_host.get(ip.strip("[]"), ())

    def subset(self, hint: Sequence[str] | None) -> Sequence[Endpoint]:
        """The endpoints a request may go to: those a subset hint allows, without those known to refuse connections if
        there are others. A hint is `ip:port` exactly, or a bare IP at any port, and never widened; None is no hint.
        IPv6 is bracketed before a port, and with or without brackets on its own."""
        if hint is None:
            return self._candidates
        allowed: dict[Endpoint, None] = {}
        for item in hint:
            endpoint = self._by_address.get(item)
            if endpoint is not None:
                allowed[endpoint] = None
            else:
                allowed.update(dict.fromkeys(self._by_host.get(item.strip("[]"), ())))
        # gateways that always send the whole pool keep the benefit of caches on `endpoints`
        return self._candidates if len(allowed) == len(self._endpoints) else _reachable(allowed)

    def reached(self, endpoint: Endpoint, reachable: bool) -> None:
        """Whether the endpoint's own port takes connections, as somebody just found out."""
        if reachable is endpoint.reachable:
            return
        endpoint.reachable = reachable
        self._candidates = _reachable(self._endpoints)
        now = "answers again" if reachable else "refuses connections: not picked until it answers"
        logger.warning("an endpoint %s", now, extra={"endpoint": endpoint.address})

    def subscribe(self, listener: FleetListener) -> None:
        """`listener` hears at once of every endpoint there is, then of every change."""
        self._listeners.append(listener)
        for endpoint in self._endpoints:
            _tell(listener.endpoint_added, endpoint)

    def apply(self, specs: Iterable[EndpointSpec]) -> None:
        """Make the fleet exactly `specs` (of two with one address the later counts). An address whose pod was replaced
        by another is a removal and an addition: nothing known of the old pod is true of the new one."""
        wanted = {spec.address: spec for spec in specs}
        removed = [e for e in self._endpoints if not _same_pod(e.spec, wanted.get(e.address))]
        for endpoint in removed:
            endpoint.gone = True
            del self._by_address[endpoint.address]
            self._slots.give_back(endpoint.slot)
        updated = [e for e in self._by_address.values() if e.spec != wanted[e.address]]
        for endpoint in updated:
            endpoint.spec = wanted[endpoint.address]
        added = [Endpoint(s, self._slots.take()) for s in wanted.values() if s.address not in self._by_address]
        self._by_address.update((e.address, e) for e in added)
        self.synced = True
        if removed or updated or added:
            self._rebuild()
            self._notify(removed, updated, added)

    def _rebuild(self) -> None:
        self._endpoints = tuple(sorted(self._by_address.values(), key=lambda e: e.slot))
        self._candidates = _reachable(self._endpoints)
        self._by_host = {}
        for endpoint in self._endpoints:
            self._by_host.setdefault(_host(endpoint.address), []).append(endpoint)

    def _notify(self, removed: list[Endpoint], updated: list[Endpoint], added: list[Endpoint]) -> None:
        for listener in tuple(self._listeners):
            # removals first: a new endpoint may have inherited a slot
            for endpoint in removed:
                _tell(listener.endpoint_removed, endpoint)
            for endpoint in updated:
                _tell(listener.endpoint_updated, endpoint)
            for endpoint in added:
                _tell(listener.endpoint_added, endpoint)
        logger.info(
            "fleet changed",
            extra={"added": len(added), "removed": len(removed), "updated": len(updated), "now": len(self._endpoints)},
        )


def _tell(notify: Callable[[Endpoint], None], endpoint: Endpoint) -> None:
    try:
        notify(endpoint)
    except Exception:
        logger.exception("a fleet listener failed", extra={"endpoint": endpoint.address})


def _reachable(endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    """All of them where none is: the knowledge may be old, and a refused request is no worse than an unrouted one."""
    every = tuple(endpoints)
    answering = tuple(endpoint for endpoint in every if endpoint.reachable)
    return every if len(answering) in (0, len(every)) else answering


def _same_pod(old: EndpointSpec, new: EndpointSpec | None) -> bool:
    return new is not None and (old.namespace, old.name, old.uid) == (new.namespace, new.name, new.uid)


def _host(address: str) -> str:
    return address.rpartition(":")[0].strip("[]")
