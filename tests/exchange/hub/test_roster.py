"""The roster against the plain way of writing it: look at everyone, every time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgetrain.exchange.hub.members import Peer, Roster


def plain_free(taken: set[int]) -> int:
    return next(i for i in range(len(taken) + 1) if i not in taken)


@given(st.lists(st.tuples(st.sampled_from("jnlm"), st.integers(0, 7)), max_size=60))
def test_finds_whom_a_look_at_everyone_finds(moves: list[tuple[str, int]]) -> None:
    roster, plain = Roster(), []
    for serial, (what, which) in enumerate(moves, 1):
        sender, session = b"c%d" % serial, serial % 5 and serial
        if what == "j":
            plain.append(Peer(roster.free_name(), sender, roster.free_index(), 1.0, 0, session))
            roster.add(plain[-1])
        elif what == "n" and roster.named(f"m{which}") is None:
            plain.append(Peer(f"m{which}", sender, roster.free_index(), 1.0, 0, session))
            roster.add(plain[-1])
        elif plain and what == "l":
            roster.remove(plain.pop(which % len(plain)))
        elif plain and what == "m":  # another connection
            peer = plain.pop(which % len(plain))
            roster.remove(peer)
            peer.sender = sender
            roster.add(peer)
            plain.append(peer)
        assert list(roster) == plain
        assert len(roster) == len(plain)
        assert roster.names == sorted(peer.name for peer in plain)
        assert roster.free_index() == plain_free({peer.index for peer in plain})
        names = {peer.name for peer in plain}
        first = next(name for i in range(len(plain) + 1) if (name := f"m{i}") not in names)
        assert roster.free_name() == first
        for peer in plain:
            assert roster.get(peer.sender) is roster.named(peer.name) is peer
            assert roster.in_session(peer.session) is (peer if peer.session else None)


def test_an_index_is_free_once_both_who_had_it_are_gone() -> None:
    roster = Roster()
    old, new = Peer("a", b"1", 0, 1.0, 0), Peer("b", b"2", 0, 1.0, 0)
    roster.add(old)
    roster.add(new)
    roster.remove(old)
    assert roster.free_index() == 1
    roster.remove(new)
    assert roster.free_index() == 0
