"""Would it hang on NCCL? Record a run on gloo, then replay its messages under NCCL's rules.

    with record() as events: ...        on each rank: what it posts and waits for, stream by stream
    replay([events of rank 0, ...])     in the parent; raises Deadlock or Mismatch

The rules. Batches of one group run on one communicator, in the order of issue: a batch is active
once it was issued and the one before it is done. A group's first batch makes the communicator, and
is active only when every rank's first batch is. A message is done when the batches of both its ends
are active, and matched messages have the same size; a batch is done when its messages are, in any
order. An operation waits for its batches before it ends, which holds up its stream, a thread here,
and not the others; in the background it posts nothing before its launcher has come to it, and its
the operation's wait() joins it after its end. Tags are not looked at.
"""

import threading
from collections import defaultdict
from contextlib import contextmanager

from collectives import observe


class Deadlock(AssertionError):
    """No rank can go on; names what each one is at."""


class Mismatch(AssertionError):
    """The two ends of a message differ in size."""


@contextmanager
def record():
    """The events of this rank, in the order in which it issues them."""
    events, batches = [], {}  # an operation -> the keys of its batches

    def note(kind, key, **what):
        events.append({"kind": kind, "key": key, "stream": threading.get_ident(), **what})

    def listen(event, operation, sends=(), receives=()):
        ranks, of = operation.ranks, operation.of or operation
        launched = id(of) if of.async_op and of.name != "exchange" else None
        if event == "begin" and of is operation:
            batches[of] = []
            if launched:
                note("launch", launched)
        elif event == "post":
            messages = [("send", ranks[peer], t.nbytes) for t, peer in sends]
            messages += [("receive", ranks[peer], t.nbytes) for t, peer in receives]
            what = {"name": of.name, "group": (of.group.group_name, tuple(ranks))}
            batches[of].append(len(events))
            note("post", len(events), messages=messages, launched=launched, **what)
        elif event == "end" and of is operation:
            for key in batches[of]:
                note("wait", key)
            if launched:
                note("end", launched)
        elif event == "end" and launched and of in batches:
            note("join", launched)

    with observe(listen):
        yield events


class _Rank:
    """One rank's streams, each at its next event, and its batches per group in order of issue."""

    def __init__(self, events):
        self.streams, self.queues = defaultdict(list), defaultdict(list)
        self.passed, self.done = set(), {None}
        for event in events:
            self.streams[event["stream"]].append(event)
            if event["kind"] == "post":
                self.queues[event["group"]].append(event | {"left": list(event["messages"])})

    def advance(self):
        """Pass every event that nothing holds up; whether there was one."""
        moved = False
        for events in self.streams.values():
            while events and self._free(events[0]):
                event = events.pop(0)
                self.passed.add((event["kind"], event["key"]))
                moved = True
        return moved

    def _free(self, event):
        kind, key = event["kind"], event["key"]
        if kind == "wait":
            return key in self.done
        if kind == "post" and event.get("launched"):
            return ("launch", event["launched"]) in self.passed
        return kind != "join" or ("end", key) in self.passed

    def active(self, group):
        """The batch that this rank's communicator of the group is at, if it was issued already."""
        head = next(iter(self.queues[group]), None)
        return head if head and ("post", head["key"]) in self.passed else None

    def finish(self, group):
        if (batch := self.active(group)) and not batch["left"]:
            self.done.add(self.queues[group].pop(0)["key"])
            return True


def replay(programs):
    """Run all ranks' events to their end. Raises Deadlock or Mismatch, with ranks and positions."""
    ranks = [_Rank(events) for events in programs]
    groups = sorted({group for rank in ranks for group in rank.queues})
    open_groups, moved = set(), True
    while moved:
        moved = any([rank.advance() for rank in ranks])
        for group in groups:
            members = group[1]
            if group not in open_groups:
                if not all(ranks[member].active(group) for member in members):
                    continue
                open_groups.add(group)
            moved |= any([_meet(ranks, group, member) for member in members])
            moved |= any([ranks[member].finish(group) for member in members])
    stuck = [f"rank {i} {_position(rank)}" for i, rank in enumerate(ranks) if _position(rank)]
    if stuck:
        raise Deadlock("; ".join(stuck))


def _meet(ranks, group, sender):
    """Do the messages that `sender` sends and their receivers are ready for."""
    batch, met = ranks[sender].active(group), False
    for message in [m for m in batch["left"] if m[0] == "send"] if batch else []:
        _, receiver, nbytes = message
        other = ranks[receiver].active(group)
        twins = [m for m in other["left"] if m[:2] == ("receive", sender)] if other else []
        for twin in twins[:1]:
            if twin[2] != nbytes:
                sent = f"rank {sender} sends {nbytes} bytes in {_text(batch)}"
                raise Mismatch(f"{sent}, rank {receiver} expects {twin[2]} in {_text(other)}")
            batch["left"].remove(message)
            other["left"].remove(twin)
            met = True
    return met


def _position(rank):
    texts = ["at " + _text(queue[0]) for queue in rank.queues.values() if queue]
    nexts = [events[0] for events in rank.streams.values() if events]
    return " and ".join(texts + [f"before {event['kind']} {event['key']}" for event in nexts])


def _text(batch):
    messages = ", ".join(f"{kind} {nbytes} B {peer}" for kind, peer, nbytes in batch["left"])
    return f"{batch['name']} (event {batch['key']}, ranks {list(batch['group'][1])}: {messages})"
