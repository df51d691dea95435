"""What an engine saves of the members: at every moment, workers that are all linked with each other."""

from hypothesis import given
from hypothesis import strategies as st

from lamina.core.pipeline import Pipeline
from lamina.core.topology import FIRST, Member, Topology
from lamina.engine.members import Record

MEMBERS = [*(Member(name, "memory", "cpu", "", 9) for name in "abc"), Member("x", "compute", "cpu", "")]
START = Topology(FIRST, tuple(MEMBERS), Pipeline(1, 1))


@given(st.lists(st.tuples(st.sampled_from(["join", "leave", "lose", "apply", "end"]), st.integers(0, 9)), max_size=40))
def test_another_engine_only_finds_members_that_all_others_know(events: list[tuple[str, int]]) -> None:
    saved: list[Topology] = []
    topology = START
    record = Record(START, saved.append)
    known = {name: START.names for name in START.names}  # the peers that each member has applied
    sent: dict[str, list[tuple[int, Topology]]] = {name: [] for name in START.names}  # changes on their way
    number, ending = 0, False
    for what, place in events:
        memories = sorted(topology.capacities)
        if what == "join" and not ending:
            number += 1
            joiner = Member(f"j{number}", "memory", "cpu", "", 9)
            topology = topology.joined([joiner], topology.pipeline)
            sent[joiner.name], known[joiner.name] = [], topology.names
        elif what == "leave" and not ending and len(memories) > 1:
            number += 1
            topology = topology.left([memories[place % len(memories)]], topology.pipeline)
        elif what == "lose" and len(memories) > 1:
            topology, ending = topology.without([memories[place % len(memories)]]), True
            record.on_workers_lost(known.keys() - topology.names)
        elif what == "apply":
            waiting = sorted(name for name in topology.names if sent[name])
            if waiting:
                name = waiting[place % len(waiting)]
                done, after = sent[name].pop(0)
                known[name] = after.names
                record.note_changed(name, done)
        elif what == "end" and ending:
            ending = False
            sent = {name: [] for name in topology.names}  # read before the end of the epoch
            known = {name: topology.names for name in topology.names}
            record.set_members(topology)
        if what in ("join", "leave") and number and not ending and topology is not saved[-1]:
            record.begin_change(number, topology)
            for name in topology.names:
                sent[name].append((number, topology))
        found = saved[-1].names
        assert found <= topology.names
        assert all(found <= known[name] for name in found)
        assert saved[-1].epoch.number >= topology.epoch.number
    for name in topology.names:
        for done, _ in sent[name]:
            record.note_changed(name, done)
    if not ending:
        assert saved[-1].names == topology.names
