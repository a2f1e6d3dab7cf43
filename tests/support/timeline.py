"""A clock for code that launches work on a GPU: when does each kernel run, and who waits for whom?

Launching work advances the host's clock. A stream begins a kernel once it has finished all earlier
ones and the host has launched it. An event, or the end of a batch, is a moment. A stream that waits
for a moment begins its next kernel no earlier; a host that waits advances its clock to the moment.
So every moment is known when the work is launched. Moments and durations are in microseconds, and
gpu_time.py supplies the durations.
"""

import weakref
from collections import Counter
from itertools import accumulate
from types import SimpleNamespace


class Host:
    """The thread that launches work, and its clock."""

    def __init__(self):
        self.now, self.streams = 0.0, []
        self.spans = []  # (lane, name, begin, duration), for the trace
        self.main = self.current = Stream(self, "main stream")

    def work(self, name, duration):
        self.spans.append(("host", name, self.now, duration))
        self.now += duration


class Event:
    """A moment of a stream, or the end of a batch.

    axis: the group whose messages the stream waited for last, to which waits are attributed.
    """

    def __init__(self, host, moment, axis):
        self.host, self.moment, self.axis = host, moment, axis

    def wait(self):
        self.host.current.wait_event(self)

    def query(self):
        return self.moment <= self.host.now

    def synchronize(self):
        self.host.work("wait", max(0.0, self.moment - self.host.now))


class Stream(Event):
    """Stands in for torch.cuda.Stream, and for NCCL's own stream of a process group.

    moment: when the stream finishes the work that it has been given so far.
    parts: the time that it spent on kernels, by kind, and waiting for the host ("starved").
    exposed: the time that it spent waiting for other streams, by axis.
    """

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
        """Run a batch after the work that the current stream has so far; return its end."""
        self.wait_stream(self.host.current)
        self.run(name, duration)
        return Event(self.host, self.moment, self.lane)

    def wait_event(self, event):
        """Begin the next kernel no earlier than the event's moment."""
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
    """The sizes of storages, and the peak of their sum.

    A record's in_use_until is the end of the last batch that reads or writes its storage. By
    PyTorch's rule the memory can be reused once the host's clock has passed it.
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
        """Return the peak in bytes, without PyTorch's rule and with it."""
        recorded = sorted(self.changes, key=lambda change: change[0])
        return [max(accumulate(more for _, more in of)) for of in (self.changes, recorded)]
