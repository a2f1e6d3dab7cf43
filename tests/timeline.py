"""When a GPU's streams do what a host launches: everything is worked out at its launch.

A host launches, and its clock goes on by what that takes. A stream begins a kernel when it has
ended all that it was given, or when the host launches it, if that is later. An event, or the end of
a batch, is a moment: a stream that waits for it begins nothing before, and a host that waits sets
its clock to it. All moments and durations are in microseconds. gpu_time.py has the durations.
"""

import weakref
from collections import Counter
from itertools import accumulate
from types import SimpleNamespace


class Host:
    """The thread that launches, and its clock."""

    def __init__(self):
        self.now, self.streams = 0.0, []
        self.spans = []  # (lane, name, begin, duration), for the trace
        self.main = self.current = Stream(self, "main stream")

    def work(self, name, duration):
        self.spans.append(("host", name, self.now, duration))
        self.now += duration


class Event:
    """A moment of a stream, or the end of a batch, and the axis whose messages came before it."""

    def __init__(self, host, moment, axis):
        self.host, self.moment, self.axis = host, moment, axis

    def wait(self):
        self.host.current.wait_event(self)

    def query(self):
        return self.moment <= self.host.now

    def synchronize(self):
        self.host.work("wait", max(0.0, self.moment - self.host.now))


class Stream(Event):
    """A torch.cuda.Stream, or NCCL's of a group. Its moment is the end of all that it was given."""

    def __init__(self, host, lane=None, **options):
        super().__init__(host, 0.0, lane)
        self.lane = lane or f"stream {len(host.streams)}"
        self.parts, self.exposed = Counter(), Counter()
        host.streams.append(self)

    def run(self, name, duration, part="other"):
        begin = max(self.moment, self.host.now)
        self.parts["starved"] += begin - self.moment
        self.parts[part] += duration
        self.moment = begin + duration
        self.host.spans.append((self.lane, name, begin, duration))

    def post(self, name, duration):
        """Run a batch behind all that the current stream was given; returns the batch's end."""
        self.wait_stream(self.host.current)
        self.run(name, duration)
        return Event(self.host, self.moment, self.lane)

    def wait_event(self, event):
        """Begin no later kernel before the event."""
        begin, self.axis = max(self.moment, self.host.now), event.axis
        if event.moment > begin:
            self.parts["starved"] += begin - self.moment
            self.exposed[event.axis] += event.moment - begin
            self.moment = event.moment

    wait_stream = wait_event

    def record_event(self):
        return Event(self.host, max(self.moment, self.host.now), self.axis)

    def __enter__(self):  # of `with torch.cuda.stream(self)`
        self.before, self.host.current = self.host.current, self

    def __exit__(self, *error):
        self.host.current = self.before


class Memory:
    """The bytes of storages, and the moment from which each change of them counts.

    in_use_until: the end of the last batch that has a storage, before which it is not free.
    """

    def __init__(self, host):
        self.host, self.records, self.changes = host, {}, []

    def resize(self, storage, nbytes):
        key = storage._cdata
        if key not in self.records:
            self.records[key] = SimpleNamespace(nbytes=0, in_use_until=0.0)
            weakref.finalize(storage, lambda: self.change(self.records.pop(key), 0))
        self.change(self.records[key], nbytes)

    def change(self, record, nbytes):
        more, record.nbytes = nbytes - record.nbytes, nbytes
        moment = self.host.now if more > 0 else max(self.host.now, record.in_use_until)
        self.changes.append((moment, more))

    def peaks(self):
        """The most bytes: of tensors, and of what is not free."""
        recorded = sorted(self.changes, key=lambda change: change[0])
        return [max(accumulate(more for _, more in of)) for of in (self.changes, recorded)]
