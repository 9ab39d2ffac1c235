"""One walk: a few links that end in one index, operations, and what must hold after each of them."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence, Set
from itertools import repeat
from unittest.mock import patch

from connector import ledger
from indexer import keys
from indexer.index import PrefixIndex
from indexer.match import Prompt as Asked
from indexer.match import match
from indexer.pool import Standing
from indexer.residency import Residency
from indexer.stream import State
from indexer.told import LATENESS, MISSED_HEARTBEATS

from .links import NOTHING, Link, Setup
from .truth import ADAPTER, BLOCK_SIZE, BLOCKS, PROMPTS, TIERS, Block, Held, Prompt, chunks, served

TICK = 1.0
STORE = "storage"
"""The tier that may be shared."""
RECOVERY_SECONDS = 150.0
"""In which a feed has to be live again once all faults have ended: some retries, one after the other."""

Operation = tuple[str, int, int, int]
"""Its name, which link, and two numbers of which it makes what it likes: every part of a walk is a walk too."""


def _asked(prompt: Prompt) -> Asked:
    tokens = b"".join(token.to_bytes(4, "little") for token in prompt.tokens)
    return Asked(tokens, prompt.adapter, prompt.salt)


ASKED = [_asked(prompt) for prompt in PROMPTS]


def _keys(model: str) -> list[int]:
    """What the index calls the blocks."""
    found: dict[Block, int] = {}
    for block in BLOCKS:
        root = keys.root_key(block.adapter or model)
        before = found[block.before] if block.before is not None else root
        salt = keys.encode_extras([block.salt]) if block.salt and block.before is None else b""
        found[block] = keys.block_key(b"".join(token.to_bytes(4, "little") for token in block.tokens), before, salt)
    return [found[block] for block in BLOCKS]


KEYS = {model: _keys(model) for model in ("", "model", "other")}
DEPTH = {block: depth for prompt in PROMPTS for depth, block in enumerate(prompt.blocks, 1)}
CHUNKS = {chunk: chunks(chunk) for chunk in (1, 2, 3)}
LAST = {chunk: frozenset(block for block in BLOCKS if DEPTH[block] % chunk == 0) for chunk in (1, 2, 3)}


def _with(masks: Sequence[int], bits: int) -> frozenset[Block]:
    if not bits:
        return frozenset()
    return frozenset(block for block, mask in zip(BLOCKS, masks, strict=True) if mask & bits == bits)


class World:
    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.now = 1000.0
        self.index = PrefixIndex()
        self.index.names.root(ADAPTER)
        chunk = rng.choice((1, 2, 3))
        pool = rng.random() < 0.3
        self.pooled: set[Block] = set()
        """What is in the store that all share, if they do."""
        self.is_pool_thinned = False
        """Somebody has lost messages, or told that a block is gone: then it is so for all, also for those who have put
        it there again meanwhile."""
        self.links = [self._link(number, rng, chunk, pool=pool) for number in range(rng.choice((1, 1, 2, 3)))]
        self.rng = rng
        self._seen: list[object] = []
        self._masks: dict[int, int] = {}

    def _link(self, number: int, rng: random.Random, chunk: int, *, pool: bool) -> Link:
        ours = rng.random() < (0.8 if pool else 0.6)
        watched = rng.random() < 0.9
        setup = Setup(
            ours=ours,
            watched=watched,
            replayable=watched and rng.random() < 0.9,
            memory=rng.choice((1, 3, 10, 10_000)),
            old_form=rng.random() < 0.3,
            heartbeat=rng.choice((0.0, 1.0, 1.0)) if ours else 0.0,
            chunk=chunk,
            describes=rng.random() < 0.5,
            pool="pool" if pool else None,
            seed=rng.choice((0, 0, 0, number)),
        )
        name = f"link-{number}"

        def publisher() -> Residency:
            residency = self.index.publisher(name)
            if not ours:
                residency.blocks_per_chunk = chunk  # as configured, or scraped
                residency.share(STORE, setup.pool)  # as the endpoint's label says
            return residency

        return Link(name, setup, publisher, lambda: self.now, self.pooled if pool else set())

    # --- operations

    def do(self, operation: Operation) -> None:
        name, number, a, b = operation
        OPERATIONS[name](self, self.links[number % len(self.links)], a, b)

    def wait(self, seconds: float, *, flowing: bool) -> None:
        end = self.now + seconds
        while self.now < end:
            alarms = [link.alarm_at for link in self.links if link.alarm_at is not None]
            self.now = min([end, self.now + TICK, *(max(at, self.now) for at in alarms)])
            for link in self.links:
                heartbeat = link.setup.heartbeat
                if heartbeat and self.now - link.sent_at >= heartbeat:
                    link.heartbeat()
                if flowing:
                    link.deliver_all()
                if link.alarm_at is not None and link.alarm_at <= self.now:
                    link.alarm_at = None
                    link.stream.alarm()
                link.stream.tick()
            self.check()

    # --- what must hold

    def check(self) -> None:
        for link in self.links:
            self._check_feed(link)
            counters = link.stream.counters
            if link.setup.pool and (counters.lost or counters.unreadable):
                self.is_pool_thinned = True
        stores = self.stores()
        seen: list[object] = [stores]
        for link in self.links:
            truths = possible(link)
            seen += [link.stream.state, link.stream.residency, *map(id, truths)]
        if seen == self._seen and self.index.masks == self._masks:
            return
        self._seen, self._masks = seen, self.index.masks.copy()
        for link in self.links:
            self._check_contents(link, stores)
        self._check_predictions(stores)

    def stores(self) -> Mapping[str, Set[Block]]:
        """For each model what is in the store that all share, as far as anybody knows whose picture is current."""
        stores: dict[str, set[Block]] = {}
        for link in self.links:
            if _shares(link):
                there = stores.setdefault(link.stream.residency.model, set())
                if _is_current(link):
                    there.update(*(held.storage for held in possible(link)))
        return stores

    def _check_contents(self, link: Link, stores: Mapping[str, Set[Block]]) -> None:
        """In every state what is held was held as of the last batch. While live it is all, but for blocks of which
        nobody can know what they are before those in front of them are held again; so predictions are compared."""
        found = self._found(link)
        if _shares(link):
            store = stores[link.stream.residency.model]
            assert found.storage <= store, (link.name, numbers(found.storage - store))
            found = Held(found.gpu, found.cpu)
        truths = possible(link)
        assert any(all(found.tier(tier) <= truth.tier(tier) for tier in TIERS.values()) for truth in truths), (
            link.name,
            link.stream,
            [{tier: numbers(found.tier(tier) - truth.tier(tier)) for tier in TIERS.values()} for truth in truths],
        )

    def _found(self, link: Link) -> Held:
        residency = link.stream.residency
        masks = list(map(self.index.masks.get, KEYS[residency.model], repeat(0)))
        gpu, cpu, storage = (_with(masks, residency.bits(tier)) for tier in TIERS.values())
        last = LAST[link.setup.chunk]
        return Held(gpu, cpu & last, storage & last)

    def _check_predictions(self, stores: Mapping[str, Set[Block]]) -> None:
        live = [link for link in self.links if link.stream.state is State.LIVE]
        residencies = [link.stream.residency for link in live]
        expected = [served(self._truth(link, stores), link.setup.chunk) for link in live]
        for number, asked in enumerate(ASKED if live else ()):
            predicted = match(self.index, asked, residencies)
            for i, link in enumerate(live):
                got = predicted.gpu[i], predicted.cpu[i], predicted.storage[i]
                truth = expected[i][number]
                if got == truth:
                    continue
                message = link.name, PROMPTS[number], got, truth
                assert link.is_blurred or self.index.forgotten or not self._is_all_of_its_store_known(link), message
                assert sum(got) <= sum(truth), message
                assert got[0] <= truth[0], message
                if not self.index.forgotten:
                    assert got[0] == truth[0], message
                    assert got[1] <= truth[1], message

    def _is_all_of_its_store_known(self, link: Link) -> bool:
        """Not while some others' pictures are incomplete, or may be of one of several lives; nor while nobody has told
        what a block is of which another one has told the hash."""
        if not _shares(link):
            return True
        model = link.stream.residency.model
        others = [other for other in self.links if _shares(other) and other.stream.residency.model == model]
        is_parked = any(pool.parking for pool in self.index.pools.values() if pool.model == model)
        return not (self.is_pool_thinned or is_parked) and all(
            other.stream.state is State.LIVE and len({held.storage for held in possible(other)}) == 1
            for other in others
            if _is_current(other)
        )

    def _truth(self, link: Link, stores: Mapping[str, Set[Block]]) -> Held:
        truth = now(link)
        store = frozenset(stores[link.stream.residency.model]) if _shares(link) else truth.storage
        return Held(truth.gpu, truth.cpu, store)

    def _check_feed(self, link: Link) -> None:
        stream = link.stream
        counters = stream.counters
        assert counters.messages == link.live_calls
        assert counters.missed >= counters.gaps
        assert counters.duplicates <= counters.messages
        assert counters.snapshots + counters.snapshots_failed <= counters.replays
        assert counters.reconnections == max(0, link.connects - 1)
        assert stream.allowance.taken == (stream._recovery.held_bytes if stream._recovery is not None else 0)
        assert 0 <= stream.trust <= 1
        assert (stream.trust == 0) == (stream.state is State.LOST)
        assert bool(stream.reason) == (stream.state is not State.LIVE)
        assert stream.lag_batches >= 0
        if stream.state is State.LIVE:
            assert stream.trust == 1
            assert stream.lag_batches == 0
            assert link.has_heard, (link.name, "live, though nothing has been heard")
            assert stream.last_seq >= link.delivered, (link.name, "live, though a loss shows", stream, link.delivered)
        if stream.told.heartbeat and (stream.state is State.LIVE or _is_current(link)):
            quiet = self.now - max(stream.heard_at, link.connected_at)
            assert quiet <= MISSED_HEARTBEATS * stream.told.heartbeat + LATENESS + TICK, (link.name, "silent")

    def check_index(self) -> None:
        """No bit that is nobody's, and every lane's count is right."""
        index = self.index
        lanes = list(index.lanes.values())
        for lane in lanes:
            assert lane.held == sum(bool(mask & lane.bit) for mask in index.masks.values())
        bits = [lane.bit for lane in lanes]
        assert len(set(bits)) == len(bits), "two lanes with one bit"
        while index.sweep():
            pass
        union = sum(bits)
        assert all(mask and not mask & ~union for mask in index.masks.values()), "bits of closed lanes"

    # --- the end

    def end(self) -> None:
        """All faults end. Then everybody must be live soon, or unsure for a reason."""
        for link in self.links:
            link.replay_dead = False
            if link.is_stalled or not link.is_connected:
                link.disconnect()
                link.connect()
            link.subscribe()
            link.have_turn()
        until = self.now + RECOVERY_SECONDS
        while self.now < until and not all(map(_is_settled, self.links)):
            for link in self.links:
                link.engine.compute(PROMPTS[0], 1, again=True)
                link.step(0)
                link.deliver_all()
                link.answer(1 << 20)
                link.have_turn()
                self.check()
            self.wait(4.0, flowing=True)
        for link in self.links:
            assert _is_settled(link), (link.name, "is stuck", link.stream, link.stream.reason)
        self.check_index()
        for link in self.links:
            link.stream.close()
        while self.index.sweep():
            pass
        assert not self.index.masks
        assert not self.index.pools


def _is_settled(link: Link) -> bool:
    """Live; or else unsure, if it is one whose publisher cannot tell what is missing."""
    tells = link.setup.ours or (len(link.truths) <= link.setup.memory and not link.is_garbled)
    must_live = link.setup.replayable and tells
    return link.stream.state is State.LIVE or (link.stream.state is State.UNSURE and not must_live)


def now(link: Link) -> Held:
    """What the engine held after the last batch that the stream reflects, in the life that was heard of last."""
    last, life = link.stream.last_seq, link.lives[link.life_heard]
    assert last < len(life), (link.name, "knows the future", link.stream)
    return life[last] if last >= 0 else NOTHING


def possible(link: Link) -> Sequence[Held]:
    """The same, of the engine's life that the stream is about. A publisher that does not name itself leaves open which
    of its lives that is."""
    last, lives = link.stream.last_seq, link.lives
    if last < 0:
        return [NOTHING]
    if link.setup.ours:
        lives = [lives[int(link.stream.instance.split()[-1])]] if link.stream.instance else []
    return [life[last] for life in lives if last < len(life)] or [NOTHING]


def _shares(link: Link) -> bool:
    """Has the picker heard that it does?"""
    return link.stream.residency.shares(STORE)


def _is_current(link: Link) -> bool:
    return link.stream.residency.standing is Standing.CURRENT


def numbers(blocks: Set[Block]) -> list[int]:
    return sorted(block.number for block in blocks)


# --- the operations


def _prompt(a: int) -> Prompt:
    return PROMPTS[a % len(PROMPTS)]


def _on_chunk(
    act: Callable[[Link, Sequence[Block]], None], may: Callable[[Link, Sequence[Block]], bool]
) -> Callable[[World, Link, int, int], None]:
    """Of one of the chunks with which it may be done."""

    def do(world: World, link: Link, a: int, b: int) -> None:
        if possible := [chunk for chunk in CHUNKS[link.setup.chunk] if may(link, chunk)]:
            act(link, possible[a % len(possible)])

    return do


def _is_in_hbm(link: Link, chunk: Sequence[Block]) -> bool:
    return all(block in link.engine.gpu for block in chunk)


def _is_in_ram(link: Link, chunk: Sequence[Block]) -> bool:
    return chunk[-1] in link.engine.cpu


def _is_stored(link: Link, chunk: Sequence[Block]) -> bool:
    return chunk[-1] in link.engine.storage


def _is_found(link: Link, chunk: Sequence[Block]) -> bool:
    """By a request with such a prompt; what blocks are is said by events of HBM."""
    return _is_stored(link, chunk) and _is_in_hbm(link, chunk)


def _compute(world: World, link: Link, a: int, b: int) -> None:
    prompt = _prompt(a)
    link.engine.compute(prompt, 1 + b % len(prompt.blocks), again=b % 7 == 0)


def _evict(world: World, link: Link, a: int, b: int) -> None:
    for n in range(1 + a % 3):
        if held := sorted(link.engine.gpu, key=lambda block: block.number):
            link.engine.evict(held[(b + n) % len(held)])


def _evict_and_offload(link: Link, chunk: Sequence[Block]) -> None:
    """The copy takes longer than HBM keeps the blocks."""
    for block in chunk:
        link.engine.evict(block)
    link.engine.offload(chunk)


def _lose_file(world: World, link: Link, a: int, b: int) -> None:
    """Where several look at one store, each that has announced a file notices that it is gone, in its own time."""
    announced = [chunk for chunk in CHUNKS[link.setup.chunk] if chunk[-1] in link.engine.announced]
    if not announced:
        return
    chunk = announced[a % len(announced)]
    link.engine.storage.discard(chunk[-1])
    world.is_pool_thinned = world.is_pool_thinned or link.setup.pool is not None
    for other in world.links if link.setup.pool and b % 2 else [link]:
        other.engine.lose_file(chunk)
    if b % 4 == 3:
        link.step(0)
        link.flight.clear()


def _reset(world: World, link: Link, a: int, b: int) -> None:
    below = bool(a % 2)
    link.engine.reset(below=below)
    if not link.setup.ours and not below:
        link.is_blurred = True


def _step(world: World, link: Link, a: int, b: int) -> None:
    link.step(a)
    if b % 16 == 0:
        link.flight.clear()
    elif b % 4:
        link.deliver_all()


def _lose(world: World, link: Link, a: int, b: int) -> None:
    for _ in range(1 + a % 3):
        if link.flight:
            link.flight.popleft()


def _restart(world: World, link: Link, a: int, b: int) -> None:
    """Perhaps it has said something before anybody listens again. No two lives are at the same time, or a batch of one
    could be just like the other's."""
    world.now += 0.01
    link.restart()
    for n in range(a % 8):
        link.engine.compute(_prompt(b + n), 2 + n, again=False)
        link.step(0)
    if b % 2:
        link.connect()
        link.subscribe()


def _remove(world: World, link: Link, a: int, b: int) -> None:
    link.remove()


def _garble(world: World, link: Link, a: int, b: int) -> None:
    link.engine.compute(_prompt(a), 1, again=True)
    link.step(0)
    link.garble()


def _connect(world: World, link: Link, a: int, b: int) -> None:
    link.connect()
    if a % 2:
        link.subscribe()


def _cut(world: World, link: Link, a: int, b: int) -> None:
    link.disconnect()
    if a % 2:
        link.break_off()
    if b % 2:
        link.connect()


def _repeat(world: World, link: Link, a: int, b: int) -> None:
    """Of a publisher whose name is not known a number that goes back means another life, so only its last message is
    repeated."""
    is_known = bool(link.instance) and link.stream.instance == link.instance
    link.repeat(link.delivered - (a % 4 if is_known else 0))


def _rename(world: World, link: Link, a: int, b: int) -> None:
    if link.setup.pool is None:
        link.rename(("model", "other")[a % 2])


def _forget(world: World, link: Link, a: int, b: int) -> None:
    """The index has more blocks than its budget allows."""
    if a % 4 == 0:
        index = world.index
        index.forget_blocks(index.order.least_useful(1 + b % 8, index.gpu_bits))


def _ask(world: World, link: Link, a: int, b: int) -> None:
    """What is asked for is forgotten last."""
    world.index.order.matters = True
    world.index.asked(ASKED[a % len(ASKED)].keys(BLOCK_SIZE, link.stream.residency.root))


def _toggle_replay(world: World, link: Link, a: int, b: int) -> None:
    link.replay_dead = a % 3 == 0


def _take_turns(world: World, link: Link, a: int, b: int) -> None:
    link.turns_are_taken = True


OPERATIONS: dict[str, Callable[[World, Link, int, int], None]] = {
    "compute": _compute,
    "evict": _evict,
    "offload": _on_chunk(lambda link, chunk: link.engine.offload(chunk), _is_in_hbm),
    "evict and offload": _on_chunk(_evict_and_offload, _is_in_hbm),
    "write": _on_chunk(lambda link, chunk: link.engine.write(chunk), _is_in_ram),
    "find": _on_chunk(lambda link, chunk: link.engine.find(chunk), _is_found),
    "promote": _on_chunk(lambda link, chunk: link.engine.promote(chunk), _is_found),
    "drop": _on_chunk(lambda link, chunk: link.engine.drop(chunk), _is_in_ram),
    "lose file": _lose_file,
    "reset": _reset,
    "step": _step,
    "heartbeat": lambda world, link, a, b: link.heartbeat() if link.setup.ours else None,
    "deliver": lambda world, link, a, b: link.deliver(),
    "deliver all": lambda world, link, a, b: link.deliver_all(),
    "lose": _lose,
    "repeat": _repeat,
    "garble": _garble,
    "connect": _connect,
    "subscribe": lambda world, link, a, b: link.subscribe(),
    "cut": _cut,
    "stall": lambda world, link, a, b: link.stall(),
    "answer": lambda world, link, a, b: link.answer(a % 8),
    "answer all": lambda world, link, a, b: link.answer(1 << 20),
    "drop frames": lambda world, link, a, b: link.drop_frames(1 + a % 2),
    "break off": lambda world, link, a, b: link.break_off(),
    "replay socket": _toggle_replay,
    "turns taken": _take_turns,
    "turn": lambda world, link, a, b: link.have_turn(),
    "restart": _restart,
    "remove": _remove,
    "rename": _rename,
    "forget": _forget,
    "ask": _ask,
    "wait": lambda world, link, a, b: world.wait((0.1, 0.6, 2.5, 6.0, 31.0)[a % 5], flowing=bool(b % 3)),
    "sweep": lambda world, link, a, b: (world.index.sweep(1), None)[1],
    "look": lambda world, link, a, b: world.check_index(),
}

ODDS = {
    **dict.fromkeys(OPERATIONS, 1),
    "compute": 12,
    "evict": 12,
    "offload": 6,
    "evict and offload": 2,
    "write": 5,
    "drop": 3,
    "lose file": 4,
    "promote": 2,
    "step": 30,
    "deliver all": 6,
    "lose": 5,
    "connect": 6,
    "subscribe": 6,
    "answer": 5,
    "answer all": 14,
    "cut": 2,
    "restart": 3,
    "repeat": 2,
    "wait": 6,
    "turn": 3,
}


def walk(seed: int, length: int = 70) -> list[Operation]:
    """Most begin with everybody connected."""
    rng = random.Random(~seed)
    names = rng.choices(list(ODDS), list(ODDS.values()), k=length)
    operations = [(name, rng.randrange(6), rng.getrandbits(16), rng.getrandbits(16)) for name in names]
    if rng.random() < 0.8:
        beginning = ("connect", "subscribe", "answer all", "answer all")
        operations[:0] = [(name, link, 0, 0) for name in beginning for link in range(3)]
    return operations


def run(seed: int, operations: Sequence[Operation]) -> None:
    with patch.object(ledger, "PART_BLOCKS", 4):
        world = World(seed)
        for operation in operations:
            world.do(operation)
            world.check()
        world.end()
