"""Members against the plain way of writing it: look at everyone, every time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from edgetrain.exchange.hub.members import MemberRecord, Members


def plain_free(taken: set[int]) -> int:
    return next(i for i in range(len(taken) + 1) if i not in taken)


@given(st.lists(st.tuples(st.sampled_from("jnlm"), st.integers(0, 7)), max_size=60))
def test_finds_whom_a_look_at_everyone_finds(moves: list[tuple[str, int]]) -> None:
    members, plain = Members(), []
    for serial, (what, which) in enumerate(moves, 1):
        sender, session = b"c%d" % serial, serial % 5 and serial
        if what == "j":
            plain.append(
                MemberRecord(members.free_name(), sender, members.free_index(), 1.0, 0, session)
            )
            members.add(plain[-1])
        elif what == "n" and members.named(f"m{which}") is None:
            plain.append(MemberRecord(f"m{which}", sender, members.free_index(), 1.0, 0, session))
            members.add(plain[-1])
        elif plain and what == "l":
            members.remove(plain.pop(which % len(plain)))
        elif plain and what == "m":  # another connection
            peer = plain.pop(which % len(plain))
            members.remove(peer)
            peer.sender = sender
            members.add(peer)
            plain.append(peer)
        assert list(members) == plain
        assert len(members) == len(plain)
        assert members.names == sorted(peer.name for peer in plain)
        assert members.free_index() == plain_free({peer.index for peer in plain})
        names = {peer.name for peer in plain}
        first = next(name for i in range(len(plain) + 1) if (name := f"m{i}") not in names)
        assert members.free_name() == first
        for peer in plain:
            assert members.get(peer.sender) is members.named(peer.name) is peer
            assert members.in_session(peer.session) is (peer if peer.session else None)


def test_an_index_is_free_once_both_who_had_it_are_gone() -> None:
    members = Members()
    old, new = MemberRecord("a", b"1", 0, 1.0, 0), MemberRecord("b", b"2", 0, 1.0, 0)
    members.add(old)
    members.add(new)
    members.remove(old)
    assert members.free_index() == 1
    members.remove(new)
    assert members.free_index() == 0
