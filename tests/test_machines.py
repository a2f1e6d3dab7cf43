"""Two machines on one: network namespaces with addresses of their own, and a link.

    ranks 0 and 1 of `a`, 10.77.0.1   == link ==   10.77.0.2, ranks 2 and 3 of `b`
"""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress

import pytest

from ranks import PROJECT

pytestmark = pytest.mark.soak
ADDRESSES = {"a": "10.77.0.1", "b": "10.77.0.2"}
TIMEOUT = 5  # seconds that a rank waits for another
SIZES = "--layers 2 --hidden 64 --sample 0 --print-every 1"


def _sh(command):
    return subprocess.run(command.split(), capture_output=True, text=True, check=True)


@pytest.fixture(scope="module")
def machines():
    """{machine: its namespace}."""
    names = {machine: f"{machine}{os.getpid()}" for machine in ADDRESSES}
    try:
        for name in names.values():
            _sh(f"ip netns add {name}")
        veth = "ip link add eth0 netns {a} type veth peer name eth0 netns {b}"
        _sh(veth.format(**names))
        for machine, name in names.items():
            _sh(f"ip -n {name} link set lo up")
            _sh(f"ip -n {name} addr add {ADDRESSES[machine]}/24 dev eth0")
            _sh(f"ip -n {name} link set eth0 up")
        yield names
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"no network namespaces: {getattr(error, 'stderr', error)}")
    finally:
        for name in names.values():
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


@contextmanager
def _agents(machines, *words):
    """torchrun on both machines: {machine: its process}, which end with the block."""
    command = f"-m torch.distributed.run --nnodes 2 --nproc-per-node 2 --rdzv-backend c10d "
    command += f"--rdzv-id test --rdzv-endpoint {ADDRESSES['a']}:29500"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(PROJECT)}
    environment |= {"GLOO_SOCKET_IFNAME": "eth0", "PYTHONUNBUFFERED": "1"}
    agents = {}
    for machine, name in machines.items():
        own = f"{command} --local-addr {ADDRESSES[machine]} "
        own += f"--rdzv-conf is_host={int(machine == 'a')}"  # which no name tells it here
        agents[machine] = subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, *own.split(), *map(str, words)],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment,
        )
    try:
        yield agents
    finally:
        for name in machines.values():  # torchrun's processes are in sessions of their own
            for pid in _sh(f"ip netns pids {name}").stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
        for agent in agents.values():
            agent.communicate()


def _run(machines, *words):
    """(Exit status, output, errors) of machine a's agent."""
    with _agents(machines, *words) as agents:
        out, err = agents["a"].communicate(timeout=120)
        agents["b"].communicate(timeout=60)
        return agents["a"].returncode, out, err


def _losses(file):
    lines = [json.loads(line) for line in file.read_text().splitlines()]  # the later ones count
    return {line["step"]: line["loss"] for line in lines if "loss" in line}


def test_a_layout_across_machines_is_cut_off_says_so_and_goes_on_to_the_same_bits(
    machines, tmp_path
):
    layout = PROJECT / "hybrid.py", *f"{SIZES} --pp 2 --tp 2 --steps 60 --timeout {TIMEOUT}".split()
    whole, metrics = tmp_path / "whole.jsonl", tmp_path / "metrics.jsonl"
    status, out, err = _run(machines, *layout, "--metrics", whole)
    assert status == 0 and "validation loss" in out and "spans nodes" not in err, err

    words = *layout, "--metrics", metrics, "--checkpoint", tmp_path / "kept", "--save-every", 4
    with _agents(machines, *words) as agents:
        for line in agents["a"].stdout:
            if line.startswith("step") and int(line.split()[1]) >= 10:
                break
        _sh(f"ip -n {machines['b']} link set eth0 down")
        _, err = agents["a"].communicate(timeout=TIMEOUT + 40)
    _sh(f"ip -n {machines['b']} link set eth0 up")
    assert agents["a"].returncode != 0
    assert re.search(r"rank [01] lost rank [23]: .*[Tt]imed out", err), err[-3000:]

    status, out, err = _run(machines, *words)
    assert status == 0 and "resumes from" in out, err
    assert _losses(metrics) == _losses(whole) and len(_losses(whole)) == 60


def test_tp_across_machines_is_warned_of(machines):
    flags = f"{SIZES} --tp 4 --steps 1".split()
    status, _, err = _run(machines, PROJECT / "hybrid.py", *flags)
    assert status == 0 and "warning: --tp 4 spans nodes" in err, err
