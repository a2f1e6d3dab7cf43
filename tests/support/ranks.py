"""Run functions on ranks: worker processes that form a new gloo process group for each call.

    run(4, function, *args)     on a pool of ranks that is kept between calls: for tests that pass
    spawn(4, function, *args)   on ranks that are used once: for tests of failure
    @on_ranks(1, 2, 3)          makes a function a test; each rank runs it, in groups of these sizes

    parent  -- task -->  each rank: PromptStore, init_process_group, function(*args), destroy
            <-- result or traceback, or end of file if the rank died --

`function` is pickled by name, so it must be at the top level of a module; arguments and results are
pickled by value. A rank that fails exits at once, and its peers notice their closed connections.

The environment variable TEST_SEED, an integer, is added to every seed of the tests (see shifted()).
A claim about random data holds for other data, too, so the tests must pass whatever it is.
"""

import _thread
import faulthandler
import functools
import gc
import importlib
import inspect
import multiprocessing
import os
import pickle
import random
import resource
import shlex
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import wait
from pathlib import Path
from unittest.mock import patch

# These must be set before torch is imported, here and in every process started from here.
os.environ.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")

import numpy as np
import pytest
import torch
import torch.distributed as dist

import collectives
from collectives import schedule_as_batch

PROJECT = Path(__file__).resolve().parents[2]
GRACE = 1.0  # seconds in which the other ranks may report after one has failed
LATE = 0.1  # seconds by which a death may be noticed after the errors that it causes on other ranks


class RanksFailed(AssertionError):
    """A rank raised, died, or did not answer in time."""


@dataclass
class Outcome:
    """How one rank ended: `error_text` is None if it returned `result`."""
    result: object
    error_text: str | None
    exitcode: int | None  # 0: it returned; 1: it raised; None: no answer; otherwise: it died
    seconds: float  # from the start of the run to the answer


def quoted(path):
    """Return a path as it is written on a command line, also if it has spaces."""
    return shlex.quote(str(path))


def shifted(seed):
    """Return a seed of the tests with TEST_SEED added, which other processes inherit."""
    return seed + int(os.environ.get("TEST_SEED", 0))


def seed_generators():
    """Seed the global generators of Python, NumPy and PyTorch."""
    random.seed(shifted(0))
    np.random.seed(shifted(0))
    torch.manual_seed(shifted(0))


# ---- in a rank -----------------------------------------------------------------------------------

@contextmanager
def least_bytes():
    """Send small tensors around the ring, too, because it sends the fewest bytes."""
    with patch.object(collectives, "choose", lambda *size, **how: "ring"):
        yield


class PromptStore(dist.Store):
    """A FileStore that sees another rank's value within 0.2 ms, and not within 10 ms.

    C++ does not keep the methods of a Python class alive, so a reference must stay.
    """

    def __init__(self, path, world_size):
        super().__init__()
        self.file = dist.FileStore(path, world_size)
        self.patience = timedelta(minutes=1)

    def set(self, key, value):
        self.file.set(key, value)

    def add(self, key, number):
        return self.file.add(key, number)

    def check(self, keys):
        return self.file.check(keys)

    def get(self, key):
        self.wait([key])
        return self.file.get(key)

    def wait(self, keys, timeout=None):
        end = time.monotonic() + (timeout or self.patience).total_seconds()
        while not self.file.check(keys):
            if time.monotonic() > end:
                raise dist.DistStoreError(f"no rank has set {keys}")
            time.sleep(2e-4)


def leave_groups():
    """Destroy all groups, also those in cycles, without waiting until they end (10 ms each)."""
    groups = dist.distributed_c10d._world.pg_map
    backends = [group._get_backend(kind) for group in groups for kind in group._device_types]
    dist.destroy_process_group()
    gc.collect()
    gc.freeze()  # later collections skip what is left
    wait_for_leaving()  # of an earlier task, so that no more than one task's groups are left
    while backends:
        is_left = _thread.allocate_lock()
        is_left.acquire()
        leaving.append(is_left)
        # threading.active_count() does not count this thread
        _thread.start_new_thread(leave, ([backends.pop()], is_left))


leaving = []  # a lock for each group that is being destroyed, held until it is gone


def leave(backend, is_left):
    """Destroy the group's backend in this list, and release the lock."""
    backend.clear()
    is_left.release()


def wait_for_leaving():
    """Wait until the groups of earlier tasks are gone."""
    while leaving:
        leaving.pop().acquire()


def limit_files(nbytes):
    """Limit the size of this process's files, None for no limit.

    Groups of earlier tasks write to their stores while they are destroyed, so they must be gone.
    """
    wait_for_leaving()
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    limit = hard if nbytes is None else nbytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))


def run_in_group(rank, world_size, store_path, group_timeout, call):
    """Make the pickled `call` inside a new default process group; return its result, pickled."""
    seed_generators()
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    schedule_as_batch()
    store = PromptStore(store_path, world_size)
    dist.init_process_group("gloo", store=store, rank=rank,
                            world_size=world_size, timeout=timedelta(seconds=group_timeout))
    dist.barrier()  # a rank that leaves while others connect to it makes them fail or block
    function, args, kwargs = pickle.loads(call)
    # Connection.send() would share a tensor's memory instead of copying it.
    result = pickle.dumps(function(*args, **kwargs))
    leave_groups()
    return result


def call_in_environment(variables, call):
    """Set environment variables, which modules may read when imported; make the pickled `call`."""
    os.environ.update(variables)
    function, args, kwargs = pickle.loads(call)
    return function(*args, **kwargs)


def on_device(kind, store, timeout, function, *arguments):
    """Replace the default group by one of this kind; return function(device, *arguments).

    kind   device of a rank          backend
    cpu    the CPU                   gloo
    gloo   one GPU, all ranks on it  gloo, through the host's memory
    nccl   a GPU of its own          NCCL for CUDA tensors, gloo for those of the CPU
    """
    rank, world_size = collectives.rank_and_size()
    dist.destroy_process_group()
    device = torch.device("cpu")
    if kind != "cpu":
        device = torch.device("cuda", rank if kind == "nccl" else 0)
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if kind == "nccl" else "gloo"
    options = {"store": dist.FileStore(store, world_size), "timeout": timedelta(seconds=timeout)}
    options["device_id"] = device if kind == "nccl" else None
    dist.init_process_group(backend, rank=rank, world_size=world_size, **options)
    dist.barrier()
    return function(device, *arguments)


def serve(pipe, stack_pipe):
    """Run a worker process's tasks until one fails or the parent exits."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    faulthandler.register(signal.SIGUSR1, file=stack_pipe.fileno(), all_threads=True)
    gc.freeze()
    exitcode = 0
    while exitcode == 0:
        try:
            task = pickle.loads(pipe.recv_bytes())
        except (EOFError, ConnectionError):
            break
        result = error_text = None
        try:
            result = run_in_group(*task)
        except BaseException:
            exitcode, error_text = 1, traceback.format_exc()
        answer = pickle.dumps((result, error_text, exitcode, time.monotonic()))
        print(end="", flush=True)
        pipe.send_bytes(answer)
    sys.exit(exitcode)


# ---- in the parent -------------------------------------------------------------------------------

class Worker:
    """One worker process, a pipe for its tasks and answers, and a pipe for its Python stack."""

    def __init__(self, context):
        self.pipe, pipe = context.Pipe()
        self.stack_pipe, stack_pipe = context.Pipe(duplex=False)
        self.process = context.Process(target=serve, args=(pipe, stack_pipe), daemon=True)
        self.process.start()
        pipe.close()
        stack_pipe.close()

    def outcome(self, start):
        """Return the Outcome once the process's pipe or sentinel is ready."""
        seconds = time.monotonic() - start - LATE
        with suppress(EOFError, ConnectionError):
            if self.pipe.poll():
                result, error_text, exitcode, end = pickle.loads(self.pipe.recv_bytes())
                result = pickle.loads(result) if error_text is None else None
                return Outcome(result, error_text, exitcode, end - start)
        self.process.join()
        code = self.process.exitcode
        name = f" ({signal.Signals(-code).name})" if code < 0 else ""
        return Outcome(None, f"died with exit code {code}{name}", code, seconds)

    def stack(self):
        """Return the stacks of the process's Python threads, or "" if it cannot answer."""
        with suppress(ProcessLookupError):
            os.kill(self.process.pid, signal.SIGUSR1)
        text = b""
        while wait([self.stack_pipe], timeout=0.2 if text else 2.0):
            if not (piece := os.read(self.stack_pipe.fileno(), 65536)):
                break
            text += piece
        return text.decode(errors="replace")


class Pool:
    """Worker processes, kept between runs. After a run that failed they are replaced."""

    def __init__(self):
        self.workers = []
        self.folder = None
        self.runs = 0

    def run(self, world_size, function, args, kwargs, timeout, group_timeout, grace):
        """Return an Outcome per rank. After a failure, other ranks have `grace` seconds left."""
        call = pickle.dumps((function, args, kwargs))
        if not all(worker.process.is_alive() for worker in self.workers):
            self.close()
        failed = True
        try:
            self.start(world_size)
            self.runs += 1
            store_path = f"{self.folder.name}/{self.runs}"  # a FileStore needs a new file
            start = time.monotonic()
            for rank, worker in enumerate(self.workers[:world_size]):
                task = rank, world_size, store_path, group_timeout or timeout + 30, call
                worker.pipe.send_bytes(pickle.dumps(task))
            outcomes = self.collect(world_size, start, timeout, grace)
            failed = any(outcome.error_text for outcome in outcomes)
            return outcomes
        finally:
            if failed:
                self.close()

    def start(self, world_size):
        """Start workers until there are at least `world_size`."""
        if self.folder is None:
            self.folder = tempfile.TemporaryDirectory(prefix="ranks-")
        context = multiprocessing.get_context("forkserver")
        # The server imports these once for all workers; optimizers import torch._dynamo (0.9 s).
        # test_gpu.py asks for GPUs when it is imported, and CUDA does not survive a fork.
        files = [*PROJECT.glob("*.py"), *PROJECT.glob("tests/**/*.py")]
        ours = {path.stem for path in files} & {*sys.modules} - {"conftest", "test_gpu"}
        context.set_forkserver_preload(["torch._dynamo", "rewriting", *sorted(ours)])
        # Python 3.11 to 3.13 do not hand sys.path to the server.
        with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            while len(self.workers) < world_size:
                self.workers.append(Worker(context))

    def collect(self, world_size, start, timeout, grace):
        outcomes = [None] * world_size
        pending = dict(enumerate(self.workers[:world_size]))
        deadline = start + timeout
        while pending and (left := deadline - time.monotonic()) > 0:
            ready = wait([end for worker in pending.values()
                          for end in (worker.pipe, worker.process.sentinel)], left)
            for rank, worker in list(pending.items()):
                if worker.pipe in ready or worker.process.sentinel in ready:
                    outcomes[rank] = worker.outcome(start)
                    del pending[rank]
                    if outcomes[rank].error_text:
                        deadline = min(deadline, time.monotonic() + grace)
        hung = deadline == start + timeout
        for rank, worker in pending.items():
            text = f"did not answer in {timeout} s" if hung else "still running"
            text += f"\n{worker.stack()}"
            outcomes[rank] = Outcome(None, text, None, deadline - start)
        return outcomes

    def close(self):
        """Kill the processes and remove the files of their groups."""
        for worker in self.workers:
            worker.process.kill()
        for worker in self.workers:
            worker.process.join()
            for end in (worker.process, worker.pipe, worker.stack_pipe):
                end.close()
        if self.folder is not None:
            self.folder.cleanup()
        self.workers, self.folder = [], None


def headline(error_text):
    """Return the line of a traceback that names the error: the first one after the last frame."""
    lines = error_text.splitlines()
    frames = [i for i, line in enumerate(lines) if line.startswith("  File ")]
    after = lines[frames[-1] :] if frames else lines
    return next(line for line in after if not line.startswith(" "))


def results(outcomes):
    """Return the results, or raise RanksFailed with the first failure or all ranks that hung."""
    failed = [rank for rank, outcome in enumerate(outcomes) if outcome.error_text]
    failed.sort(key=lambda rank: outcomes[rank].seconds)
    lines = []
    for rank in failed:
        text = outcomes[rank].error_text
        if rank == failed[0] or outcomes[failed[0]].exitcode is None:
            lines.append(f"rank {rank} of {len(outcomes)} failed:\n{text}")
        else:
            reason = "still running" if outcomes[rank].exitcode is None else headline(text)
            lines.append(f"rank {rank} failed after it: {reason}")
    if failed:
        raise RanksFailed("\n".join(lines))
    return [outcome.result for outcome in outcomes]


pool = Pool()


def run(world_size, function, *args, timeout=40, group_timeout=None, **kwargs):
    """Call `function(*args, **kwargs)` on the ranks of a new group; return the results by rank.

    Raise RanksFailed once a rank has raised or died, or after `timeout` seconds, with the stack of
    each rank that is still running. The group's own timeout is longer, unless it is given.
    """
    return results(pool.run(world_size, function, args, kwargs, timeout, group_timeout, GRACE))


def spawn(world_size, function, *args, check=True, timeout=40, group_timeout=None, **kwargs):
    """Do what run() does in new processes. check=False: wait for all ranks, return the Outcomes."""
    grace = GRACE if check else timeout
    once = Pool()
    try:
        outcomes = once.run(world_size, function, args, kwargs, timeout, group_timeout, grace)
    finally:
        once.close()
    return results(outcomes) if check else outcomes


def torchrun(world_size, *words, **options):
    """Run a Python command under torchrun; return its CompletedProcess, with text output.

    The command can import the project's modules. options: arguments of subprocess.run().
    """
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += [f"--nproc-per-node={world_size}", *map(str, words)]
    options = {"timeout": 120, "capture_output": True, "text": True} | options
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": str(PROJECT)}, **options)


def soak(*row):
    """Mark a row of a test's parameters "soak"."""
    return pytest.param(*row, marks=pytest.mark.soak)


def call_body(module, name, /, **arguments):
    """Run the body of a test that on_ranks() made. Pickle requires that it is found by name."""
    return getattr(importlib.import_module(module), name).__wrapped__(**arguments)


def on_ranks(*world_sizes, **options):
    """Make a function a test that runs it on each rank of groups of these sizes.

    Its parameters come from pytest, also as fixtures, and must be picklable. A size may be a
    pytest.param, or a function of the parameters: on_ranks(lambda ep, dp, **_: ep * dp). options:
    arguments of run().
    """

    def decorate(body):
        @functools.wraps(body)
        def test(world_size, **arguments):
            size = world_size(**arguments) if callable(world_size) else world_size
            run(size, call_body, body.__module__, body.__name__, **options, **arguments)

        signature, own = inspect.signature(body), inspect.Parameter("world_size", 1)
        test.__signature__ = signature.replace(parameters=[own, *signature.parameters.values()])
        of_others = lambda size: "ranks" if callable(size) else None
        return pytest.mark.parametrize("world_size", world_sizes, ids=of_others)(test)

    return decorate
