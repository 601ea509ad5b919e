"""The protocol between groups, simulated: every order in which messages arrive up to a bound, and many random ones."""

from __future__ import annotations

import pickle
import random
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from parverify.bab.stealing import Rules, State, Stealing, nearest_first
from parverify.errors import ParverifyError
from parverify.parallel.slots import Kind, Message, Why

Tree = Mapping[int, Sequence[int]]
LATER = 100.0  # longer than any delay of the rules
ACTIONS = ("time", "drop", "repeat")
FORK: Tree = {0: [1, 2, 3], 3: [4, 5]}  # the first grant is 3, which has children
WIDE: Tree = {0: [1, 2, 3, 4]}
THREE: Tree = {0: [1, 2, 3]}


@dataclass
class Groups:
    """Groups around a network, as the search runs them: a batch is one domain, with a step at its end.

    Args:
        tree: children of each domain.
        machines: one a group.
        pools: open domains of each group.
        left: how often time may pass, a message may be dropped, repeated.
        stops: domains whose group then stops the search.
    """

    tree: Tree
    machines: list[Stealing]
    pools: list[list[int]]
    left: dict[str, int] = field(default_factory=dict)
    stops: Mapping[int, Why] = field(default_factory=dict)
    working: list[list[int]] = field(default_factory=list)
    net: list[Message] = field(default_factory=list)
    done: list[int] = field(default_factory=list)
    now: list[float] = field(default_factory=list)

    @staticmethod
    def make(
        tree: Tree, size: int, *, kind: type[Stealing] = Stealing, mint: int = 4, pools: Any = None, **more: Any
    ) -> Groups:
        """All roots at group 0, unless `pools` says otherwise."""
        rules = Rules(mint=mint)
        machines = [kind(me, nearest_first(me, [0] * size), rules) for me in range(size)]
        pools = pools or [[0], *([] for _ in range(size - 1))]
        return Groups(tree, machines, pools, working=[[] for _ in range(size)], now=[0.0] * size, **more)

    def actions(self) -> Iterator[tuple[str, int]]:
        """What may happen next."""
        for group, machine in enumerate(self.machines):
            if not machine.over and (self.working[group] or self.pools[group] or machine.open or not machine._started):
                yield "step", group
            if self.left.get("time") and machine.next_time() < LATER * 1e6:
                yield "time", group
        different = {repr(message): place for place, message in enumerate(self.net)}.values()
        for name in ("deliver", "drop", "repeat"):
            if name == "deliver" or self.left.get(name):
                yield from ((name, place) for place in different)

    def act(self, name: str, place: int) -> None:
        """Let it happen."""
        if name in ACTIONS:
            self.left[name] -= 1
        if name == "step":
            self.step(place)
        elif name == "time":
            self.now[place] += LATER
            self.net += self.machines[place].tick(self.now[place])
        elif name == "repeat":
            self.net.append(self.net[place])
        else:
            message = self.net.pop(place)
            if name == "deliver":
                self.net += self.machines[message.receiver].receive(message, self.now[message.receiver])

    def step(self, group: int) -> None:
        """The end of a group's batch, and the start of its next one."""
        machine, pool, now = self.machines[group], self.pools[group], self.now[group]
        for domain in self.working[group]:
            self.done.append(domain)
            pool.extend(self.tree.get(domain, ()))
            if domain in self.stops:
                self.net += machine.stop(self.stops[domain], str(domain).encode(), now)
        self.working[group] = []
        if machine.over:
            return
        for domains in machine.collect():
            pool.extend(domains)
        self.net += machine.update(len(pool), now)
        while (share := machine.next_share()) is not None:
            peer, count = share
            given = tuple(pool.pop() for _ in range(count))
            self.net += machine.grant(peer, count, given, now)
        if pool and not machine.over:
            self.working[group] = [pool.pop(0)]

    def key(self) -> Any:
        """The state as far as it decides what comes; the time counts only by what is due."""
        parts: list[Any] = [
            sorted(map(repr, self.net)),
            self.pools,
            self.working,
            sorted(self.left.items()),
            sorted(self.done),
        ]
        for machine, now in zip(self.machines, self.now, strict=True):
            state = dict(vars(machine))
            parcels = state.pop("_parcels")
            due = [(key, parcel.due <= now) for key, parcel in parcels.items()]
            parts.append([due, state.pop("_ask_due") <= now, state.pop("_more_due") <= now, sorted(state.items())])
        return repr(parts)

    # --- what must hold -----------------------------------------------------------------------------------------------

    def on_their_way(self) -> list[Message]:
        """Parcels that their receiver has not accepted."""
        return [
            parcel.message
            for machine in self.machines
            for (peer, epoch), parcel in machine._parcels.items()
            if epoch not in self.machines[peer]._seen[machine.me]
        ]

    def check(self) -> None:
        """Every domain is in one place or done; nobody says finished too early; no credit is lost or made."""
        if all(machine.state is not State.STOPPED for machine in self.machines):
            open_now = [domain for domains in (*self.pools, *self.working) for domain in domains]
            open_now += [domain for machine in self.machines for got in machine._arrived for domain in got.payload]
            open_now += [domain for parcel in self.on_their_way() for domain in parcel.payload or ()]
            born = {0} | {child for domain in self.done for child in self.tree.get(domain, ())}
            assert Counter([*open_now, *self.done]) == Counter(born), "a domain is lost or worked on twice"
            if any(machine.over for machine in self.machines):
                assert not open_now, "finished with open domains"
        if not any(machine.over for machine in self.machines):
            away = sum(machine.credit for machine in self.machines[1:])
            away += sum(parcel.credit for parcel in self.on_their_way())
            assert self.machines[0].outstanding == away, "credit is lost or made"

    def complete(self) -> None:
        """Nothing goes wrong any more and time passes: it must come to its end."""
        for _ in range(300):
            if all(machine.settled for machine in self.machines):
                break
            for group in range(len(self.machines)):
                self.step(group)
                self.left["time"] = 1
                self.act("time", group)
            for _ in range(len(self.net)):
                self.act("deliver", 0)
            self.check()
        else:
            raise AssertionError("it does not end")
        self.check()

    def everything(self) -> list[int]:
        """All domains of the tree."""
        return sorted({0, *(child for children in self.tree.values() for child in children)})


def copied(frozen: bytes) -> Groups:
    found: Groups = pickle.loads(frozen)
    return found


def explore(start: Groups, most: int = 50000) -> Counter[Kind]:
    """How often each kind is delivered in all states that can be reached.

    Each is checked, and those where nothing can happen must come to their end.

    Once one group has said that all is closed, nothing is left to be found but that the others hear of it.
    """
    seen, kinds = {start.key()}, Counter[Kind]()
    stack = [start]
    while stack:
        state = stack.pop()
        frozen = pickle.dumps(state, -1)
        finished = any(machine.state is State.FINISHED for machine in state.machines)
        actions = [] if finished else list(state.actions())
        if not actions or len(seen) % 200 == 0:
            final = copied(frozen)
            final.complete()
            assert sorted(final.done) == final.everything()
        for action in actions:
            if action[0] == "deliver":
                kinds[state.net[action[1]].kind] += 1
            after = copied(frozen)
            after.act(*action)
            after.check()
            key = after.key()
            if key not in seen:
                seen.add(key)
                stack.append(after)
        assert len(seen) < most, "too many states for a test"
    return kinds


@pytest.mark.parametrize("left", [{}, {"drop": 1}, {"repeat": 1}], ids=str)
@pytest.mark.parametrize("mint", [4, 2], ids=lambda mint: f"mint-{mint}")
def test_two_groups_in_every_order(left: dict[str, int], mint: int) -> None:
    assert explore(Groups.make(FORK, 2, left=left, mint=mint))[Kind.GRANT] > 3


def test_three_groups_in_every_order() -> None:
    assert explore(Groups.make({0: [1]}, 3))[Kind.DENY] > 1000


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "tree", "left"),
    [
        (2, FORK, {"time": 1}),
        (2, WIDE, {"time": 1}),
        (2, FORK, {"time": 1, "drop": 1}),
        (2, FORK, {"drop": 1, "repeat": 1}),
        (3, THREE, {}),
    ],
    ids=str,
)
def test_more_orders(size: int, tree: Tree, left: dict[str, int]) -> None:
    assert explore(Groups.make(tree, size, left=left), 200000)[Kind.GRANT] > 10


def test_every_order_of_a_search_that_all_begin() -> None:
    """Domains are dealt out before; both groups become idle at the same time in some orders."""
    groups = Groups.make(THREE, 2, pools=[[], [0]], left={"time": 1})
    assert explore(groups)[Kind.GRANT] > 3


# --- protocols that are wrong -----------------------------------------------------------------------------------------


class Trusting(Stealing):
    """Takes a parcel as often as it comes."""

    def _on_parcel(self, message: Message, now: float) -> None:
        self._seen[message.sender].beyond.discard(message.epoch)
        self._seen[message.sender].below = min(self._seen[message.sender].below, message.epoch)
        super()._on_parcel(message, now)


class Forgetful(Stealing):
    """Keeps no parcel."""

    def tick(self, now: float) -> list[Message]:
        out = super().tick(now)
        self._parcels.clear()
        return out


class Hasty(Stealing):
    """Ends when this group and those that it has asked have nothing."""

    def _refused(self, now: float) -> None:
        super()._refused(now)
        if not self.me and not self._denials:
            self.outstanding = 0


class Generous(Stealing):
    """Gives its last credit away."""

    def _split(self) -> int:
        given, self.credit = self.credit, 0
        return given if self.me else super()._split()


@pytest.mark.parametrize(
    ("kind", "pools", "left"),
    [
        (Trusting, [[0], []], {"repeat": 1}),
        (Forgetful, [[0], []], {}),
        (Hasty, [[0], []], {}),
        (Generous, [[], [0]], {}),
    ],
)
def test_the_simulation_finds_what_is_wrong(kind: type[Stealing], pools: Any, left: dict[str, int]) -> None:
    with pytest.raises((AssertionError, ParverifyError)):
        explore(Groups.make(FORK, 2, kind=kind, pools=pools, left=left))


# --- at random --------------------------------------------------------------------------------------------------------


def random_tree(draw: random.Random, count: int) -> Tree:
    """A tree of `count` domains; later ones hang on recent ones more often, so that it is skewed."""
    tree: dict[int, list[int]] = {}
    for domain in range(1, count):
        tree.setdefault(draw.randrange(max(0, domain - 8), domain), []).append(domain)
    return tree


def wander(groups: Groups, draw: random.Random, kinds: Counter[Kind], most: int = 3000) -> None:
    """Random actions, with a few faults among many that are none, then the end without faults."""
    weights = {"step": 6, "deliver": 6, "time": 1, "drop": 1, "repeat": 1}
    for _ in range(most):
        actions = list(groups.actions())
        if not actions or all(machine.over for machine in groups.machines):
            break
        name, place = draw.choices(actions, [weights[name] for name, _ in actions])[0]
        if name == "deliver":
            kinds[groups.net[place].kind] += 1
        groups.act(name, place)
        groups.check()


@pytest.mark.parametrize("size", [2, 3, 4, 5, 6])
def test_at_random_with_loss_and_repetition(size: int) -> None:
    kinds: Counter[Kind] = Counter()
    for seed in range(40):
        draw = random.Random(seed)
        faults = {"time": 300, "drop": draw.choice([0, 20, 200]), "repeat": draw.choice([0, 20, 200])}
        groups = Groups.make(random_tree(draw, 40), size, left=faults, mint=draw.choice([2, 4, 1 << 32]))
        for machine in groups.machines:
            machine.low = draw.choice([0, 0, 3])
        wander(groups, draw, kinds)
        groups.complete()
        assert sorted(groups.done) == list(range(40))
    assert min(kinds[kind] for kind in Kind if kind not in (Kind.STOP, Kind.END)) > 0


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_stop_is_heard_and_no_domain_is_lost(size: int) -> None:
    """Once all have parted, every open domain is in exactly one pool, also those that were on their way."""
    came_back = 0
    for seed in range(150):
        draw = random.Random(seed)
        tree = random_tree(draw, 30)
        stops = {domain: draw.choice(list(Why)) for domain in draw.sample(range(5, 30), 3)}
        groups = Groups.make(tree, size, left={"time": 50, "drop": 30, "repeat": 30}, stops=stops)
        wander(groups, draw, Counter())
        groups.complete()
        if draw.random() < 0.5:  # an end may come before its reason does, so they are not in the order of groups
            groups.machines.reverse()
        for machine in groups.machines:
            for message in [word for peer in machine.peers for word in machine.last_words(peer)]:
                next(other for other in groups.machines if other.me == message.receiver).receive(message, 0.0)
        came = [domain for machine in groups.machines for domains in machine.collect() for domain in domains]
        came_back += len(came)
        left = [domain for domains in (*groups.pools, *groups.working) for domain in domains] + came
        born = {0} | {child for domain in groups.done for child in tree.get(domain, ())}
        assert Counter([*left, *groups.done]) == Counter(born)
        notices = [machine.notices.keys() for machine in groups.machines]
        assert all(keys == notices[0] and keys for keys in notices)
        assert all(machine.state is State.STOPPED for machine in groups.machines)
    assert came_back > 0


# --- alone ------------------------------------------------------------------------------------------------------------


def test_nearest_first() -> None:
    assert nearest_first(0, [0] * 5) == (1, 4, 2, 3)
    assert nearest_first(1, [0, 0, 1, 0, 1]) == (0, 3, 2, 4)


def test_a_group_without_others_is_done_when_its_pool_is_empty() -> None:
    machine = Stealing(0, [])
    machine.update(1, 0.0)
    assert not machine.over
    machine.update(0, 0.0)
    assert machine.state is State.FINISHED and machine.settled


def test_requests_are_answered_by_the_difference() -> None:
    rich = Stealing(1, [0, 2])
    rich.update(9, 0.0)
    assert rich.receive(Message(Kind.REQUEST, 0, 1, 1, 3), 0.0) == []
    assert rich.next_share() == (0, 3)
    (grant,) = rich.grant(0, 3, "abc", 0.0)
    assert (grant.kind, grant.count, grant.credit) == (Kind.GRANT, 3, 1 << 31)
    (deny,) = rich.receive(Message(Kind.REQUEST, 2, 1, 1, 5), 0.0)
    assert deny.kind is Kind.DENY and rich.next_share() is None


def test_what_has_arrived_meanwhile_is_not_granted() -> None:
    machine = Stealing(1, [0, 2])
    machine.update(5, 0.0)
    machine.receive(Message(Kind.GRANT, 2, 1, 0, 20, 8, "twenty"), 0.0)
    machine.receive(Message(Kind.REQUEST, 0, 1, 1, 1), 0.0)
    assert machine.open == 25 and machine.next_share() == (0, 2)


def test_the_wait_after_refusals_grows_and_is_bounded() -> None:
    rules = Rules(pause=1.0, longest_pause=4.0)
    machine = Stealing(1, [0, 2], rules)
    now, waits = 0.0, []
    messages = machine.update(0, now)
    for _ in range(5):
        for _ in range(2):
            (request,) = [message for message in messages if message.kind is Kind.REQUEST]
            messages = machine.receive(Message(Kind.DENY, request.receiver, 1, request.epoch), now)
        waits.append(machine._ask_due - now)
        now = machine._ask_due
        messages = machine.tick(now)
    assert waits == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_domains_without_credit_are_noticed() -> None:
    machine = Stealing(1, [0])
    machine.update(0, 0.0)
    with pytest.raises(ParverifyError, match="no credit"):
        machine.update(1, 0.0)
