"""Sites behind gateways, in memory: the bits of a star, and nothing lost or counted twice."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
from fleet import Disk, Fleet
from hub_desk import RESUME, ZEROS, Desk, back, raw, refusal, the
from hypothesis import example, given
from hypothesis import strategies as st
from sites import SitedFleet

from edgetrain.errors import Diverged, Refused
from edgetrain.exchange.gateway.site import CUT_OFF, NOBODY_HERE, REACHED, SiteTensors
from edgetrain.exchange.hub.members import MemberRecord
from edgetrain.exchange.hub.protocol import NOBODY
from edgetrain.exchange.hub.records import Above, CountedOnce, Entered, Sent, State, decode, encode
from edgetrain.exchange.hub.terms import Policy
from edgetrain.exchange.messages import NO_WEIGHT, Base, Beat, Reply, Start, Welcome, unpack

STRATEGIES = ("sync-sgd", "local-sgd", "fedavg", "dga", "diloco", "fedyogi", "scaffold")
CODECS = ("fp32", "int8", "topk(0.3) | q2")
WEIGHTS = [1.0, 2.0, 3.0, 5.0]


def star(strategy, members, **known):
    return Fleet(strategy, members, 2, 5, 11, weights=WEIGHTS[:members], **known).run()


def sited(strategy, sites, **known):
    return SitedFleet(strategy, sites, 2, 5, 11, weights=WEIGHTS[: sum(sites)], **known)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_one_site_of_all_members_is_a_star_bit_for_bit(strategy, codec):
    if strategy == "scaffold" and codec != "fp32":
        pytest.skip("a codec that scaffold does not go with")
    one, other = star(strategy, 3, codec=codec), sited(strategy, [3], codec=codec).run()
    assert other.hub.round == one.hub.round
    for member, twin in zip(one.members, other.everyone, strict=True):
        assert twin.params.tobytes() == member.params.tobytes()
        assert twin.checksums == member.checksums


@pytest.mark.parametrize("sites", [[1, 3], [2, 2], [1, 1, 2]])
@pytest.mark.parametrize("strategy", ["fedavg", "dga", "diloco", "sync-sgd"])
def test_several_sites_are_a_star_up_to_the_order_of_sums(strategy, sites):
    one, other = star(strategy, 4), sited(strategy, sites).run()
    assert len({member.params.tobytes() for member in other.everyone}) == 1
    whole = one.members[0].params
    assert np.abs(other.everyone[0].params - whole).max() <= 1e-6 * np.abs(whole).max()
    assert {closed.weight for closed in other.closed} == {closed.weight for closed in one.closed}


def test_replies_come_down_byte_for_byte_and_say_how_many_contributed():
    fleet = sited("dga", [2, 1], codec="int8", disk=Disk(), site_disks=[Disk(), Disk()]).run()
    above = fleet.disk.rounds()
    for site in fleet.members:
        below = site.disk.rounds()
        assert [(r.reply, r.checksum, r.delay, r.members) for r in below] == [
            (r.reply, r.checksum, r.delay, 3) for r in above
        ]


@given(
    st.sampled_from(["sync-sgd", "fedavg", "dga", "diloco"]),
    st.sampled_from([[3], [1, 2], [1, 1, 1]]),
    st.sampled_from(CODECS),
    st.integers(0, 2**32),
)
@example("fedavg", [1, 2], "fp32", 4046)  # a site that dies as it joins begins a round late
def test_whatever_dies_or_breaks_every_contribution_counts_once(strategy, sites, codec, seed):
    rng = random.Random(seed)
    snapshot = (lambda: 0) if strategy == "sync-sgd" else (lambda: rng.choice([0, 1, 3]))
    disks = [Disk(snapshot()) for _ in sites]
    deaths = [[rng.randint(3, 150) for _ in range(rng.randint(0, 2))] for _ in sites]
    fleet = sited(
        strategy, sites, codec=codec, rng=random.Random(seed), disk=Disk(snapshot()),
        kills=[rng.randint(5, 150) for _ in range(rng.randint(0, 2))],
        site_disks=disks, site_kills=deaths,
    )  # fmt: skip

    def cut():
        chance = rng.random()
        site = rng.choice(fleet.members)
        if chance < 0.02:
            fleet.cut(site.index)
        elif chance < 0.04:
            site.cut(rng.randrange(len(site.members)))

    try:
        fleet.run(cut)
    except Refused as refused:  # a gateway that died before it knew that training had begun
        if (strategy, refused.code) != ("sync-sgd", "started"):
            raise
        return
    assert [member.state for member in fleet.everyone] == ["done"] * 3
    ends = {(member.half.applied, member.params.tobytes()) for member in fleet.everyone}
    assert len(ends) == len({member.half.applied for member in fleet.everyone})
    counted = list(itertools.chain.from_iterable(disk.counted for disk in disks))
    assert len(counted) == len(set(counted))
    gave = {(f"m{m.index}", round) for m in fleet.everyone for round in m.submitted}
    assert set(counted) == gave
    went_up = fleet.disk.counted
    assert len(went_up) == len(set(went_up))
    assert not [note for note in fleet.notes if note.event == "refused"], "no site says too much"


def gone(site):
    """The members of a site cannot be reached for as long as their gateway has patience."""
    for member in site.members:
        member.wire.die()
        site.carry_out(site.hub.unreachable(member.address, site.now))
    site.tick(site.hub.policy.lost_after_s)


@given(st.sampled_from(["fedavg", "dga", "diloco"]), st.integers(0, 2**32), st.booleans())
@example("fedavg", 96, False)  # contributions to rounds that the site left out
@example("dga", 349, True)  # a reply that seemed to settle them
@example("fedavg", 5503562, False)  # one ends while its request to join is on the way
def test_a_site_whose_members_are_gone_holds_nobody_up_and_comes_back(strategy, seed, cuts):
    rng = random.Random(seed)
    disks = [Disk(), Disk()]
    fleet = sited(
        strategy, [2, 2], rng=random.Random(seed), disk=Disk(), site_disks=disks,
    )  # fmt: skip
    first, when, events = fleet.members[0], rng.randint(20, 60), itertools.count()

    def each():
        if next(events) == when and first.state == "training":
            gone(first)
        elif cuts and rng.random() < 0.04:
            fleet.cut(rng.randrange(2))

    fleet.run(each)
    # One that is away when the others of its site are done finds no gateway any more.
    states = [member.state for member in fleet.everyone]
    assert states.count("done") >= 3
    bases = {pair for member in fleet.everyone for pair in member.checksums.items()}
    assert len(bases) == len({applied for applied, _ in bases})
    # A round waits for one that ended as it joined, until its gateway knows that it is gone.
    assert sum(bool(closed.missing) for closed in fleet.closed) <= states.count("refused")
    counted = list(itertools.chain.from_iterable(disk.counted for disk in disks))
    assert len(counted) == len(set(counted))
    gave = {(f"m{m.index}", n) for m in fleet.everyone if m.state == "done" for n in m.submitted}
    assert set(counted) >= gave
    assert len(fleet.disk.counted) == len(set(fleet.disk.counted))


def test_a_site_without_members_is_told_of_once_and_costs_no_deadline():
    fleet = sited("dga(paper)", [2, 2])
    first, other = fleet.members
    events, ended = itertools.count(), []

    def each():
        if next(events) == 40:
            gone(first)
        if other.state == "done":
            ended.append(fleet.now)

    fleet.run(each)
    assert ended[0] == 0.0  # it waited for no deadline
    assert [note.reason for note in first.notes].count(NOBODY_HERE) == 1
    assert [(n.member, n.reason) for n in fleet.notes].count(("s0", NOBODY)) == 1


def test_a_lost_way_up_is_told_in_one_line_and_costs_nothing():
    fleet = sited("dga", [2, 2], disk=Disk(), site_disks=[Disk(), Disk()])
    first, events = fleet.members[0], itertools.count()

    def each():
        if next(events) == 40:
            fleet.unplug(0)

    fleet.run(each)
    told = [note.reason for note in first.notes if note.member == "hub"]
    assert (told.count(CUT_OFF), told.count(REACHED)) == (1, 1)
    assert [member.state for member in fleet.everyone] == ["done"] * 4
    gave = {(f"m{m.index}", n) for m in fleet.everyone for n in m.submitted}
    assert {each for site in fleet.members for each in site.disk.counted} == gave


def test_a_member_that_joins_late_gets_the_base_and_a_place_among_all():
    fleet = sited("dga", [2, 2])
    fleet.run()
    indices = [site.hub.membership.first_index for site in fleet.members]
    assert sorted(indices) == [0, 2]


def gateways(**policy):
    """A desk whose hub lets gateways in."""
    return Desk(4, gateways=True, **policy)


def test_a_hub_counts_the_members_behind_a_gateway():
    desk = gateways()
    desk.join("a", behind=3)
    assert desk.hub.members.places == 3
    found = refusal(desk, desk.join("b", behind=2), "b")
    assert found == ("full", "3 of 4 places are taken, and the gateway's site has 2 members")
    said = desk.join("c")
    assert the(Welcome, said["c"]).index == 3
    assert refusal(desk, desk.join("d"), "d") == ("full", "all 4 places are taken")


def test_a_job_without_gateways_lets_none_in():
    desk = Desk(4)
    code, reason = refusal(desk, desk.join("a", behind=3), "a")
    assert code == "gateway"
    assert "fleet.gateways=true" in reason


def started():
    desk = gateways(quorum=3)
    desk.join("a", behind=3)
    desk.join("b")
    desk.tell("a", Base(0, 1, raw(ZEROS)))
    assert desk.hub.started
    return desk


def test_a_site_counts_by_the_weight_it_says_and_for_all_of_its_members():
    desk = started()
    desk.give("b", 0, np.full(5, 4.0))
    said = desk.give("a", 0, np.full(5, 8.0), weight=3.0, members=3)
    reply = the(Reply, said["b"])
    assert reply.members == 4
    assert np.frombuffer(reply.payload, np.float32).tolist() == [7.0] * 5


def test_a_gateway_without_members_is_not_waited_for_until_it_is_back():
    desk = gateways()
    desk.join("a", behind=3, session=7)
    desk.join("b")
    desk.tell("a", Base(0, 1, raw(ZEROS)))
    desk.give("a", 0, members=3)
    desk.tell("a", Beat(merged=1))
    desk.give("b", 0)
    desk.give("b", 1)  # does not wait
    assert [closed.missing for closed in desk.closed] == [(), ()]
    known = {"name": "a", "session": 7, "submitted": 1, "oldest": 1, "applied": 2}
    said = back(desk, "z", **RESUME | known | {"checksum": desk.hub.checksum(2)})
    assert the(Start, said["z"]).round == 2
    desk.give("b", 2)
    assert len(desk.closed) == 2


def test_a_quorum_counts_the_contributions_in_one():
    desk = started()
    desk.give("a", 0, weight=3.0, members=3)
    assert not desk.closed
    desk.tick(desk.hub.policy.deadline_s)
    assert len(desk.closed) == 1


@pytest.mark.parametrize(
    ("who", "wrong", "said"),
    [
        ("b", {"members": 2}, "only a gateway says how many contributions are in one"),
        ("a", {}, "0 contributions in one of a site of 3"),
        ("a", {"members": 2, "weight": 1e9}, "a weight of 1e+09 of 2 contributions"),
    ],
)
def test_what_a_site_says_is_checked(who, wrong, said):
    desk = started()
    assert refusal(desk, desk.give(who, 0, **wrong), who) == ("order", said)


@pytest.mark.parametrize(
    ("given", "counts"),  # by round: contributions that the site of 3 says, and how many count
    [
        ([3, 3, 3], [3, 3, 3]),
        ([1000, 3], [3, 3]),
        ([3, 1024, 3, 6], [3, 3, 3, 3]),
        ([2, 4, 3], [2, 4, 3]),  # one of round 0 was late
        ([2, 5], [2, 4]),
        ([1, 0, 10, 4], [1, 0, 8, 3]),
    ],
)
def test_a_site_counts_no_more_than_its_members_can_have_given(given, counts):
    desk = started()
    for round, said in enumerate(given):
        at = {"applied": round, "checksum": desk.hub.checksum(round)}
        desk.give("a", round, members=said, weight=float(said) or NO_WEIGHT, **at)
        desk.give("b", round, **at)
        desk.tick(desk.hub.policy.deadline_s + 1)
        site = desk.hub.members.named("a")
        header, _ = encode(Entered(site.seat()))
        assert MemberRecord.of_seat(decode(header, b"").seat).used == site.used
    assert [closed.weight for closed in desk.closed] == pytest.approx([1.0 + n for n in counts])
    assert desk.events().count(("refused", "a")) == sum(map(int.__gt__, given, counts))


def test_a_liar_of_a_gateway_has_the_say_of_its_members():
    """A site of one that says 1,000: its weight, the count in the reply, and a quorum."""
    desk = gateways(quorum=3)
    desk.join("a", behind=1)
    for name in "bcd":
        desk.join(name)
    desk.tell("a", Base(0, 1, raw(ZEROS)))
    desk.give("a", 0, np.full(5, 9.0), weight=1000.0, members=1000)
    desk.give("b", 0)
    desk.tick(desk.hub.policy.deadline_s + 1)
    assert not desk.closed, "two of four are no quorum of three"
    reply = the(Reply, desk.give("c", 0)["b"])
    assert reply.members == 3
    assert np.frombuffer(reply.payload, np.float32).tolist() == [3.0] * 5
    (line,) = [note.reason for note in desk.notes if note.event == "refused"]
    assert line == "round 0: 1000 contributions in one of its site, which has 1 to give"


def test_a_gateway_joins_no_gateway():
    site = sited("dga", [2, 1]).members[0]
    assert not site.hub.terms.gateways


@pytest.mark.parametrize("seed", range(3))
def test_two_gateways_of_one_name_are_told_how_to_end_that_and_so_are_members(seed):
    fleet = sited("dga", [2, 2], rng=random.Random(seed))
    for site in fleet.members:
        site.hub.part.name = "localhost"
    with pytest.raises(Refused, match=r"'localhost' is there already.*gateway --name"):
        fleet.run()
    (site,) = (each for each in fleet.members if each.hub.part.refused)
    told = [unpack(member.wire.to_member[-1]) for member in site.members]
    assert [each.code for each in told] == ["name"] * 2
    assert all("the hub above refuses this site" in each.reason for each in told)


def test_a_base_that_differs_from_the_one_above_ends_the_site():
    fleet = sited("dga", [1, 1])
    site = fleet.members[0]
    entry_of_start = site.hub.rounds.begin

    def begin(base, entry):
        base[0] += 1
        entry_of_start(base, entry)

    site.hub.rounds.begin = begin
    with pytest.raises(Diverged, match="at this gateway"):
        fleet.run()


def test_records_of_a_gateway_come_back_as_they_were():
    vector = np.arange(4, dtype=np.float32)
    sent = Sent(7, (CountedOnce("m1", 7, 2.0),), 2.0, 1, 5, 99, 3, 0.5, vector.data.cast("B"))
    header, payloads = encode(sent)
    again = decode(header, b"".join(payloads))
    assert bytes(again.vector) == vector.tobytes()
    assert encode(again)[0] == header
    above = Above(2**63 + 5, "s0", 2, 8, (sent,))
    state = State(
        "job", "model", b"", 4, 0, 6, 0, (), (), ((6, 1),), np.ones(4, np.float32), above=above
    )
    header, payloads = encode(state)
    found = decode(header, b"".join(payloads))
    assert (found.above.session, found.above.name, found.above.next_round) == (2**63 + 5, "s0", 8)
    assert bytes(found.above.kept[0].vector) == vector.tobytes()
    assert found.memory == {}


def test_fixed_tensors_pass_through():
    tensors = SiteTensors(b"abcd")
    other = SiteTensors(b"----")
    other.write(tensors.read())
    assert (other.size, other.digest) == (4, tensors.digest)


def test_the_journal_of_a_hub_is_not_a_gateways():
    fleet = sited("dga", [1, 1], site_disks=[Disk(), Disk()]).run()
    site = fleet.members[0]
    hub_state = Fleet("dga", 1, 2, 5, 4, policy=Policy(1)).run().hub.state()
    with pytest.raises(Refused, match="not a gateway's"):
        site.fresh_hub().restore(hub_state, [], 0.0)


def test_two_sites_of_eight_send_an_eighth_of_a_stars_bytes():
    """Over the way out, both ways, headers included."""
    given = {"local_steps": 2, "delay": 5, "steps": 80, "elements": 4_000}
    carried = []
    for fleet in (Fleet("dga", 16, **given), SitedFleet("dga", [8, 8], **given)):
        total = 0

        def count(frames, fleet=fleet):
            nonlocal total
            total += sum(memoryview(frame).nbytes for frame in frames)

        for member in fleet.members:
            for way in ("send", "send_to_member"):
                inner = getattr(member.wire, way)
                setattr(member.wire, way, lambda f, inner=inner: (count(f), inner(f)))
        fleet.run()
        carried.append(total)
    one, other = carried
    assert other <= 1.02 * one / 8
