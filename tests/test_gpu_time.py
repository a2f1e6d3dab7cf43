"""timeline.py gives timelines worked out by hand, in microseconds; gpu_time.py prints a step."""

import json
import re
import shlex
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

import fake_cuda
import hybrid
from gpu_time import GPUS, Timer, bubble_share, parse
from ranks import PROJECT, quoted
from timeline import Host, Memory, Stream


def test_streams_run_side_by_side_kernels_in_order_and_a_stream_waits_for_an_event():
    host = Host()
    side = Stream(host)
    host.work("launch", 5)
    host.main.run("a", 100)  # main 5-105
    with side:
        assert host.current is side
        side.run("b", 30)  # side 5-35
    host.main.run("c", 10)  # main 105-115
    assert host.current is host.main
    assert (host.main.moment, side.moment) == (115, 35)
    side.wait_event(host.main.record_event())
    side.run("d", 1)  # 115-116; the side stream was idle from 35 to 115
    assert side.moment == 116 and sum(side.exposed.values()) == 80
    assert host.main.parts == {"starved": 5, "other": 110}
    assert [span[2:] for span in host.spans] == [(0, 5), (5, 100), (5, 30), (105, 10), (115, 1)]


def test_a_batch_waits_for_earlier_kernels_and_for_earlier_batches_of_its_group():
    host = Host()
    tp, dp, side = Stream(host, "tp"), Stream(host, "dp"), Stream(host)
    host.main.run("a", 50)  # 0-50
    first = tp.post("first", 20)  # 50-70, after the kernel
    with side:
        second = tp.post("second", 10)  # 70-80, after the first batch
        other = dp.post("other", 10)  # 0-10, on another communicator, from an idle stream
        second.wait()  # only the side stream waits
    assert [event.moment for event in (first, second, other)] == [70, 80, 10]
    assert (side.moment, host.main.moment, host.now) == (80, 50, 0)
    host.main.wait_event(side.record_event())
    assert host.main.moment == 80 and host.main.exposed == {"tp": 30}
    other.wait()  # this batch ended long ago
    assert host.main.exposed == {"tp": 30}


def test_the_host_runs_ahead_until_it_waits_and_a_late_host_starves_the_stream():
    host = Host()
    host.work("launch", 5)
    host.main.run("a", 100)  # 5-105
    event = host.main.record_event()
    host.work("launch", 5)
    host.main.run("b", 10)  # 105-115
    assert host.now == 10 and not event.query()
    event.synchronize()
    assert host.now == 105 and event.query() and not host.main.query()
    event.synchronize()  # this wait takes no time
    host.work("python", 30)  # 105-135; main is idle from 115
    host.main.run("c", 1)
    assert host.main.moment == 136 and host.main.parts["starved"] == 5 + 20
    batch = Stream(host, "dp").post("batch", 50)  # 136-186
    host.work("python", 11)  # 135-146; main waits for the host from 136, for the batch from 146
    batch.wait()
    assert host.main.parts["starved"] == 25 + 10 and host.main.exposed == {"dp": 40}


def test_memory_of_a_message_is_free_once_the_host_has_seen_the_end_of_its_batch():
    host = Host()
    memory = Memory(host)
    sent, computed = (SimpleNamespace(nbytes=0, in_use_until=0.0) for _ in range(2))
    memory.change(sent, 10)
    memory.change(computed, 1)
    batch = Stream(host, "dp").post("batch", 100)  # 0-100
    sent.in_use_until = batch.moment
    memory.change(computed, 0)  # free at once
    memory.change(sent, 0)  # free from 100 on
    memory.change(computed, 5)  # at 0, beside the 10 bytes that are not free yet
    assert memory.peaks() == [11, 15]
    batch.synchronize()
    memory.change(sent, 10)  # at 100, in the memory that is free again
    assert memory.peaks() == [15, 15]


def test_causal_attention_takes_half_the_time_and_fp32_15_times():
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    timer = SimpleNamespace(gpu=GPUS["h100"])
    x = torch.empty(2, 4, 64, 16, device="meta", dtype=torch.bfloat16)
    time = lambda q, causal: Timer.computing(timer, attention, (q, q, q, 0.0, causal), {}, (q,))
    half = time(x, True)
    assert [time(x, False), time(x.float(), False)] == pytest.approx([2 * half, 30 * half])


PP = "--gpus 8 --pp 2 --microbatches 4"
LARGE = f"{PP} --vocab-size 100000 --layers 2 --schedule"  # the head costs more than a layer


@pytest.mark.parametrize(
    "flags, rank",
    [
        ("--gpus 8 --tp 4", 0),
        (f"{PP} --layers 5", 0),  # 3 layers, and 2 and a head of 0.2 layers
        (f"{PP} --layers 5 --vocab-size 2048", 4),  # the head costs 1.2 layers: 3 and 2 + 1.2
        (f"{PP} --layers 6 --vocab-size 2048", 0),  # 4 and 2 + 1.2
        (f"{PP} --layers 5 --vocab-size 2048 --recompute full", 0),  # 3 and 2 + 0.9
        (f"{LARGE} 1f1b", 4),
        (f"{LARGE} dualpipe", 0),  # a replica's head is on each rank
        (f"{LARGE} zb-v", 0),  # the route ends where it begins
        (f"{LARGE} zb-v --rank 5", 5),
    ],
)
def test_the_rank_with_the_most_flops_is_timed_unless_one_is_named(flags, rank):
    own, _ = parse(flags.split())
    assert own.rank == rank


def test_the_bubble_is_that_of_the_schedules_formula():
    """In 1F1B a rank is idle for (p - 1) (F + B), while it works for m (F + B)."""
    _, args = parse("--gpus 4 --pp 4 --microbatches 8".split())
    assert [bubble_share(place, args) for place in range(4)] == pytest.approx([3 / 8] * 4)
    _, args = parse("--gpus 4 --tp 4".split())
    assert bubble_share(0, args) == 0


@pytest.mark.parametrize("recompute, backward", [("none", 2), ("full", 3)])
def test_a_recomputed_forward_is_a_part_of_the_backward_that_the_bubble_waits_for(
    recompute, backward
):
    """In ZB-H1, with F = W = 1, a rank is idle for (p - 1) (F + B - 2 W)."""
    flags = f"--gpus 4 --pp 4 --microbatches 8 --schedule zb-h1 --recompute {recompute}"
    _, args = parse(flags.split())
    expected = 3 * (1 + backward - 2) / (8 * (1 + backward))
    assert [bubble_share(place, args) for place in range(4)] == pytest.approx([expected] * 4)


FLAGS = "--dtype bf16 --layers 2 --hidden 256 --heads 4 --seq-len 1024 --vocab-size 512"
KEYS = "rank step_ms bubble_ms mfu products_ms other_ms exposed_ms starved_ms batches messages peak_gb"


def gpu_time(*flags):
    command = [sys.executable, str(PROJECT / "tests/tools/gpu_time.py"), *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    return pytest.skip("no C++ compiler") if "C++ compiler" in done.stderr else done


def test_the_command_prints_a_step_whose_parts_add_up_and_writes_a_trace(library, tmp_path):
    path = tmp_path / "trace.json"
    flags = shlex.split(f"--gpus 8 --json --trace {quoted(path)} --tp 4 --sp {FLAGS}")
    command = ["-W", "ignore", str(PROJECT / "tests/tools/gpu_time.py"), *flags]
    done = fake_cuda.run(library, command, capture_output=True, text=True, timeout=120)
    found = json.loads(done.stdout)
    progress = re.compile(r"\d+ s: (builds the model|step [12], action \d+ of \d+)")
    assert done.returncode == 0 and all(map(progress.fullmatch, done.stderr.splitlines()))
    assert [*found] == [*KEYS.split(), "peak_recorded_gb", "nccl_gb"]
    parts = found["products_ms"], found["other_ms"], found["starved_ms"]
    assert sum(parts) + sum(found["exposed_ms"].values()) == pytest.approx(found["step_ms"])
    assert any("tp" in axis for axis in found["exposed_ms"]) and min(parts) > 0
    assert found["peak_gb"] < found["peak_recorded_gb"]
    assert found["nccl_gb"] == pytest.approx((3 + 1) * 32 * 12e6 / 1e9)  # peers of tp and of dp
    args = hybrid.parse(FLAGS.split(), 1)
    flops = hybrid.flops_per_token(args) * args.batch_size * 1024 / 8
    reached = flops / (found["step_ms"] / 1e3) / (1e12 * GPUS["h100"].tflops)
    assert found["mfu"] == pytest.approx(reached)
    spans = json.loads(path.read_text())
    assert {"host", "main stream", *found["exposed_ms"]} <= {span["tid"] for span in spans}
    for lane in {span["tid"] for span in spans}:
        of_lane = [span for span in spans if span["tid"] == lane]
        ends = [span["ts"] + span["dur"] for span in of_lane]
        assert all(end <= span["ts"] + 1e-6 for end, span in zip(ends, of_lane[1:]))


@pytest.mark.soak
def test_pairs_of_half_of_the_passes_hide_a_quarter_of_what_is_exposed_over_nodes():
    flags = "--gpu h800 --gpus 32 --json --dtype bf16 --layers 2 --hidden 4096 --heads 32"
    flags += " --seq-len 4096 --vocab-size 512 --batch-size 64 --microbatches 4 --ffn 1408"
    flags += " --experts 32 --top-k 8 --shared-experts 1 --ep 16 --pp 2 --schedule dualpipe-v"
    done = [gpu_time(*flags.split(), *overlap) for overlap in ((), ("--overlap",))]
    alone, pairs = (json.loads(of.stdout) for of in done)
    waits = lambda of: of["exposed_ms"]["cross"] + of["exposed_ms"]["node"]
    exposed = [waits(of) for of in (alone, pairs)]
    assert exposed[1] < exposed[0] * 3 / 4
    assert pairs["step_ms"] < alone["step_ms"]  # but with so few microbatches, the bubble eats it
    assert pairs["messages"] == alone["messages"]
    for peak in "peak_gb", "peak_recorded_gb":
        assert pairs[peak] < 1.1 * alone[peak]


@pytest.mark.soak
def test_an_invalid_flag_ends_with_exit_status_2():
    done = gpu_time("--gpus", "8", "--tp", "3")
    assert done.returncode == 2 and "--tp 3" in done.stderr


@pytest.mark.parametrize(
    "flags, fault",
    [
        ("--gpus 0", "argument --gpus: 0 is not in [1, inf)"),
        ("--gpus 2 --batch-us -1", "argument --batch-us: -1 is not in [0, inf)"),
        ("--gpus 2 --layers 0", "--layers: 0 is not in [1, 100000)"),
        ("--gpus 2 --rank 2", "--rank 2 is not below --gpus 2"),
        ("--gpus 2 --trace none/x", "[Errno 2] No such file or directory: 'none/x'"),
    ],
)
def test_an_invalid_flag_is_refused_before_the_measurement(capsys, flags, fault):
    with pytest.raises(SystemExit, match="2"):
        parse(flags.split())
    assert capsys.readouterr().err.splitlines()[-1] == f"gpu_time.py: error: {fault}"
