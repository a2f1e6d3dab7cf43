"""What a command of tests/tools is doing, on stderr, if it takes longer than a few seconds."""

import sys
import threading
import time
from contextlib import contextmanager
from itertools import count

EVERY = 5.0  # seconds


@contextmanager
def progress(what):
    """While inside, print every few seconds how long it has taken, and what is being done.

    what: words such as "reads FILE". Yields a function that replaces them.
    """
    begin = time.monotonic()
    done = threading.Event()
    doing = [what]

    def say(other):
        doing[0] = other

    def tell():
        while not done.wait(EVERY):
            print(f"{time.monotonic() - begin:.0f} s: {doing[0]}", file=sys.stderr, flush=True)

    thread = threading.Thread(target=tell)
    thread.start()
    try:
        yield say
    finally:
        done.set()
        thread.join()


def say_actions(pipeline, say):
    """Make a Pipeline say which action of a step it performs."""
    perform = pipeline.perform
    total = len(pipeline.schedule[pipeline.rank])
    numbers = count()

    def told(*action):
        step, number = divmod(next(numbers), total)
        say(f"step {step + 1}, action {number + 1} of {total}")
        return perform(*action)

    pipeline.perform = told
