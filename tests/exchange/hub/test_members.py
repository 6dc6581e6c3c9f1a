"""Members against the plain way of writing it: look at everyone, every time."""

from __future__ import annotations

import ast
from dataclasses import fields
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from edgetrain.exchange.hub import members as members_module
from edgetrain.exchange.hub.contributions import Contribution
from edgetrain.exchange.hub.members import NEXT_STATE, MemberRecord, Members
from edgetrain.exchange.hub.open_rounds import OpenRounds
from edgetrain.exchange.hub.records import Entered, decode, encode
from edgetrain.strategies.closing import QuorumAndDeadline


def plain_free(taken: set[int]) -> int:
    return next(i for i in range(len(taken) + 1) if i not in taken)


@given(st.lists(st.tuples(st.sampled_from("jnlmgb"), st.integers(0, 7)), max_size=60))
def test_finds_whom_a_look_at_everyone_finds(moves: list[tuple[str, int]]) -> None:
    members, plain, away = Members(3), [], []
    for serial, (what, which) in enumerate(moves, 1):
        sender, session = b"c%d" % serial, serial % 5 and serial
        if what == "j":
            plain.append(
                MemberRecord(members.free_name(), sender, members.free_index(), 1.0, 0, session)
            )
            members.add(plain[-1])
        elif what == "n" and f"m{which}" not in {member.name for member in plain + away}:
            plain.append(MemberRecord(f"m{which}", sender, members.free_index(), 1.0, 0, session))
            members.add(plain[-1])
        elif plain and what == "l":
            members.remove(plain.pop(which % len(plain)))
        elif plain and what == "g":  # given up
            away.append(plain.pop(which % len(plain)))
            members.remove(away[-1], may_return=True)
            del away[:-3]
        elif away and what == "b":  # back
            plain.append(away.pop(which % len(away)))
            members.move(plain[-1], sender)
        elif plain and what == "m":  # another connection
            member = plain.pop(which % len(plain))
            members.move(member, sender)
            plain.append(member)
        assert list(members) == plain
        assert len(members) == len(plain)
        assert members.names == sorted(member.name for member in plain)
        assert members.free_index() == plain_free({member.index for member in plain})
        assert list(members.away) == away
        names = {member.name for member in plain + away}
        first = next(name for i in range(len(names) + 1) if (name := f"m{i}") not in names)
        assert members.free_name() == first
        for member in plain:
            assert members.get(member.sender) is members.named(member.name) is member
            assert members.in_session(member.session) is (member if member.session else None)


def test_an_index_is_free_once_both_who_had_it_are_gone() -> None:
    members = Members()
    old, new = MemberRecord("a", b"1", 0, 1.0, 0), MemberRecord("b", b"2", 0, 1.0, 0)
    members.add(old)
    members.add(new)
    members.remove(old)
    assert members.free_index() == 1
    members.remove(new)
    assert members.free_index() == 0


def test_only_its_own_methods_write_a_members_record() -> None:
    names = {field.name for field in fields(MemberRecord)}
    room = Path(members_module.__file__).parent
    wrong = []
    for path in room.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            targets = node.targets if isinstance(node, ast.Assign) else []
            if isinstance(node, ast.AugAssign | ast.AnnAssign):
                targets = [node.target]
            flat = [each for target in targets for each in ast.walk(target)]
            wrong += [
                f"{path.name}:{each.lineno} writes {ast.unparse(each)}"
                for each in flat
                if isinstance(each, ast.Attribute)
                and isinstance(each.ctx, ast.Store)
                and each.attr in names
                and ast.unparse(each.value) != "self"
            ]
    assert wrong == []


def test_the_table_of_states_is_the_one_in_the_docstring() -> None:
    words = {
        "starts": "training begins for it",
        "misses a round": "a round closes without it",
        "is heard": "any message of it",
        "leaves": "`Leave`",
        "is given up": "it is given up",
        "resumes": "`Resume` is accepted",
    }
    rows = [line for line in (members_module.__doc__ or "").splitlines() if "  " in line]
    for happening, said in words.items():
        (row,) = [line for line in rows if said in line and "Join" not in line]
        before = {word.strip() for word in row.split("  ")[0].split(",")}
        assert before == {state for state, what in NEXT_STATE if what == happening}


def test_what_was_merged_before_a_late_contribution_of_another_range_is_not_due_again():
    member = MemberRecord("a", b"1", 0, 1.0, 0, merged_by_range=[0, 1, 2])
    for round in (1, 2, 4):  # the contribution to round 0 was late, and waits for round 6
        member.mark_merged(round)
    assert member.merged == 0
    again = MemberRecord.of_seat(decode(*written(Entered(member.seat()))).seat)
    assert (again.next_round, again.merged_by_range) == (0, [0, 7, 5])
    due = []
    for _ in range(3):
        due.append(again.next_round)
        again.complete_contribution(b"", 0)
    assert due == [0, 3, 5]


def written(record):
    """As a journal has it."""
    header, payloads = encode(record)
    return header, b"".join(payloads)


def test_a_late_contribution_that_waits_for_its_range_does_not_start_the_rounds_deadline():
    members = Members()
    senders = [MemberRecord(name, name.encode(), i, 1.0, 0) for i, name in enumerate("ab")]
    for member in senders:
        members.add(member)
        member.start(0, 0)
    rounds = OpenRounds(members, QuorumAndDeadline(1, 10.0))
    late, timely = (Contribution(m.name, 1.0, ()) for m in senders)
    rounds.add(4, senders[0], 1, late, 5.0, opens=False)
    assert rounds.check(4, 30.0) is None
    rounds.add(4, senders[1], 4, timely, 30.0)
    assert rounds.check(4, 39.0) is None
    entry, missing = rounds.check(4, 40.0)
    assert (len(entry.contributions), missing) == (2, ("a",))
