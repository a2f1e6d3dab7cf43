"""Layouts, collectives and kernels work on this machine's GPUs: pytest tests/test_gpu.py

Tests that need one GPU, or several, are skipped where there are fewer. Some also run on the CPU.
"""

import itertools
import os
import pickle
import signal
import time
import warnings
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_map_only

import collectives
import layouts
import sequence_parallel
import tensor_parallel
import test_collectives
import test_expert_parallel
from layouts import EVERY_LAYOUT, LAYERS, MOE, MOE_LAYOUTS, RUN, make_trainer, own_batch
from ranks import call_in_environment, on_device, run, shifted, soak, spawn

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
one_gpu = pytest.mark.skipif(GPUS < 1, reason="there is no GPU")
several_gpus = pytest.mark.skipif(GPUS < 2, reason=f"there are {GPUS} GPUs, not several")
ON_CPU = soak("cpu")  # runs the code of a GPU test without a GPU
DEVICES = [ON_CPU, pytest.param("cuda", marks=one_gpu)]
ALONE = [ON_CPU, pytest.param("nccl", marks=one_gpu)]
SEVERAL = [ON_CPU, pytest.param("nccl", marks=several_gpus)]
WAIT = 60  # the timeout of a group's operations in seconds, several times the slowest one

# ---- ranks on GPUs -------------------------------------------------------------------------------


@pytest.fixture
def on(tmp_path):
    """Provide on(kind, world_size, function, *arguments), the ranks' function(device, *arguments).

    With `environment`, the ranks are new processes. They set these variables before they import
    this file, because CUDA reads its variables once, and the import asks for GPUs.
    """
    numbers = itertools.count()

    def call(kind, world_size, function, *arguments, environment=None, **options):
        call = kind, str(tmp_path / str(next(numbers))), WAIT, function, *arguments
        options = {"timeout": 10 * WAIT, "group_timeout": WAIT} | options
        if environment is None:
            return run(world_size, on_device, *call, **options)
        later = pickle.dumps((on_device, call, {}))
        return spawn(world_size, call_in_environment, environment, later, **options)

    return call


def _kinds(*world_sizes):
    """Return rows (kind, ranks): on the CPU, sharing one GPU, and with one GPU each."""
    enough = lambda n: pytest.mark.skipif(GPUS < n, reason=f"there are {GPUS} GPUs, not {n}")
    rows = [soak("cpu", world_sizes[0])]
    rows += [pytest.param("gloo", n, marks=one_gpu) for n in world_sizes]
    return rows + [pytest.param("nccl", n, marks=enough(n)) for n in world_sizes]


# ---- one GPU: hybrid alone -----------------------------------------------------------------------


def _watched_steps(device, flags):
    """Take three steps; return their losses, and how often the host waited for the device."""
    trainer, losses, waits = make_trainer(flags, device=device), [], []
    watch = torch.cuda.set_sync_debug_mode if device.type == "cuda" else lambda mode: None
    for step in range(RUN):
        batch = own_batch(trainer, step)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            watch("warn")
            losses.append(trainer.step(*batch)["loss"])
            watch("default")
        waits.append(sum("synchronizing" in str(w.message) for w in caught))
    return losses, waits


FAR = {  # {flags: bound on the relative difference from a plain GPT in fp32; 2e-2: another model}
    "": 5e-5, "--recompute selective": 5e-5,
    "--recompute full": 5e-5, "--zero 1": 5e-5,
    "--dtype bf16": 1e-2, "--dtype bf16 --recompute full": 1e-2, "--dtype bf16 --zero 1": 1e-2,
    "--dtype bf16 --kv-heads 2": 2e-2, "--dtype bf16 --dropout 0.1 --recompute full": 2e-2,
    "--dtype bf16 --experts 4 --top-k 2": 2e-2,
    "--experts 4 --top-k 2 --balance bias --zero 1": 2e-2,
}  # fmt: skip


@pytest.mark.parametrize("kind", ALONE)
@pytest.mark.parametrize("flags", FAR)
def test_one_process_trains_and_waits_for_its_gpu_once_a_step(on, kind, flags):
    ((losses, waits),) = on(kind, 1, _watched_steps, f"--microbatches 4 {flags}")
    expected = [loss for loss, _, _ in layouts.reference(torch.float32)[0]]
    assert losses == pytest.approx(expected, rel=FAR[flags])
    layers = LAYERS * ("--experts" in flags)  # these wait for their rows in each microbatch
    assert waits[1:] == [0 if kind == "cpu" else 1 + 4 * layers] * (RUN - 1)


# ---- one GPU: kernels ----------------------------------------------------------------------------


def _relative(found, expected):
    return ((found.double().cpu() - expected.cpu()).norm() / expected.norm().cpu()).item()


def _plain_attention(q, k, v, causal):
    """Return the output and the log-sum-exp of attention, from the full scores."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("heads, kv_heads", [(8, 8), (8, 2), (6, 1)])
@pytest.mark.parametrize("queries, keys", [(64, 64), (33, 33), (48, 40), (40, 77), (1, 129)])
@pytest.mark.parametrize("size", [64, 24])
def test_attention_of_a_block_and_its_gradients_agree_with_fp64(
    device, dtype, heads, kv_heads, queries, keys, size
):
    causal = queries == keys
    torch.manual_seed(shifted(0))
    q, k, v, grad = (
        torch.randn(2, h, t, size).to(dtype)
        for h, t in [(heads, queries), (kv_heads, keys), (kv_heads, keys), (heads, queries)]
    )
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = _plain_attention(*exact, causal)
    expected_grads = torch.autograd.grad(expected, exact, grad.double())
    q, k, v, grad = (x.to(device) for x in (q, k, v, grad))
    output, lse = sequence_parallel.block_attention(q, k, v, causal)
    grads = sequence_parallel.block_attention_backward(grad, q, k, v, output, lse, causal)
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert lse.shape == (2, heads, queries) and _relative(lse, expected_lse) < 2e-4
    for found, wanted in zip([output, *grads], [expected, *expected_grads]):
        assert found.shape == wanted.shape and _relative(found, wanted) < tolerance


@one_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kv_heads", [8, 2])
def test_attention_on_a_gpu_stores_no_scores(dtype, kv_heads):
    T = 8192
    q, k, v = (
        torch.randn(1, h, T, 64, device="cuda", dtype=dtype, requires_grad=True)
        for h in (8, kv_heads, kv_heads)
    )
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    tensor_parallel.attention(q, k, v).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < 8 * T * T * q.element_size() / 4


@one_gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("D, width", [(16, 24), (5, 3)])  # PyTorch's kernel takes the first
@pytest.mark.parametrize("sizes", [[3, 0, 4, 1], [0, 0, 0, 0], [0, 7, 0, 0]])
def test_experts_agree_with_mlps_though_some_are_idle(dtype, D, width, sizes):
    test_expert_parallel.check_experts(dtype, D, width, sizes, device="cuda")


# ---- one GPU: streams ----------------------------------------------------------------------------


@one_gpu
def test_work_of_a_stream_runs_in_order_with_kernels_and_the_host_does_not_wait():
    cycles = 2 * 10**8  # about 0.1 s
    stream, x = collectives._Stream(), torch.zeros(1000, device="cuda")
    (x.fill_(0).mul_(2) + 1).tolist()  # the first launch of a kernel waits until it is loaded
    torch.cuda.synchronize()
    began = time.perf_counter()
    torch.cuda._sleep(cycles)
    x.fill_(3)  # before the work

    def double_late():
        torch.cuda._sleep(cycles)
        x.mul_(2)

    pending = stream.submit(double_late, [x])
    assert not pending.is_completed()
    pending.finish()
    y = x + 1  # after it
    launched = time.perf_counter() - began
    assert y.tolist() == [7] * 1000 and pending.is_completed()
    assert launched < (time.perf_counter() - began) / 4


# ---- ranks that share a GPU, or have one each: collectives ---------------------------------------


def _check_collectives(device, async_op):
    """Run tests of test_collectives.py, and large messages, with tensors on this device."""
    on_device = lambda make: lambda *shape, **how: make(*shape, **how).to(device)
    made = {name: on_device(getattr(test_collectives, name)) for name in ("_integers", "_normal")}
    with patch.multiple(test_collectives, **made):
        test_collectives._check_values([1 << 18], [torch.float32], async_op=async_op)
        test_collectives.check_every_collective(async_op)
        if not async_op:
            with patch.object(collectives, "SEGMENT", 1 << 12):
                test_collectives.check_every_algorithm()


@pytest.mark.parametrize("kind, world_size", _kinds(3, 2, 4, 8))
@pytest.mark.parametrize("async_op", [False, True])
def test_every_collective_and_algorithm_is_exact_on_gpus(on, kind, world_size, async_op):
    on(kind, world_size, _check_collectives, async_op)


# ---- ranks that share a GPU, or have one each: training ------------------------------------------


def _train(device, flags, dtype):
    """Run layouts.train() on this device; return its result on the host."""
    with patch.object(layouts, "make_trainer", partial(make_trainer, device=device)):
        return tree_map_only(torch.Tensor, torch.Tensor.cpu, layouts.train(flags, dtype))


@pytest.fixture
def assert_trains(on, monkeypatch):
    """Provide assert_trains(kind, world_size, flags, mixture), which compares with one process.

    It runs in fp64, except context parallelism, whose attention has no fp64 kernel on GPUs.
    """

    def check(kind, world_size, flags, mixture=None, **options):
        call = lambda n, function, *args: on(kind, n, _train, *args, **options)
        monkeypatch.setattr(layouts, "run", call)
        if mixture:
            return layouts.assert_trains_as_a_loop_does(world_size, flags, mixture)
        exact = torch.float64, 1e-11, 1e-9, 1e-9
        if "--cp " in flags and kind != "cpu":
            layouts.assert_trains(world_size, flags, torch.float32, 5e-5, 3e-4, 3e-3, steps=1)
        else:
            layouts.assert_trains(world_size, flags, *exact)

    return check


def _rows(layouts):
    """Return (kind, ranks, ...) of the layouts that can share a GPU, or have one each."""
    each = [row for row in layouts if 1 < row[0] <= max(GPUS, 2)]
    rows = [pytest.param("gloo", *row, marks=one_gpu) for row in layouts if row[0] in (2, 4)]
    return rows + [pytest.param("nccl", *row, marks=several_gpus) for row in each]


MIXED = [(*layout, m) for layout in MOE_LAYOUTS if "--cp " not in layout[1] for m in MOE]


@pytest.mark.soak
@pytest.mark.parametrize("flags", ["--tp 2 --microbatches 2", "--cp 2 --zero 1 --microbatches 2"])
def test_these_checks_of_layouts_pass_on_the_cpu(assert_trains, flags):
    assert_trains("cpu", 2, flags)


@pytest.mark.parametrize("kind, world_size, flags", _rows(EVERY_LAYOUT))
def test_every_layout_trains_on_gpus_as_one_process_does(assert_trains, kind, world_size, flags):
    assert_trains(kind, world_size, flags)


@several_gpus
@pytest.mark.parametrize("world_size, flags", [r for r in EVERY_LAYOUT if 1 < r[0] <= max(GPUS, 2)])
def test_every_layout_trains_if_a_gpu_has_one_hardware_queue(assert_trains, world_size, flags):
    environment = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert_trains("nccl", world_size, flags, environment=environment)


@pytest.mark.parametrize("kind, world_size, flags, mixture", _rows(MIXED))
def test_experts_train_on_gpus_as_a_loop_does(assert_trains, kind, world_size, flags, mixture):
    assert_trains(kind, world_size, f"{flags} --microbatches 1", mixture)


IN_BF16 = ["--dp 2 --zero 0", "--dp 2 --zero 1", "--tp 2 --sp", "--pp 2 --schedule zb-h1"]
IN_BF16 += [f"--cp 2 --cp-method {name} --hidden 64" for name in ("ring", "allgather", "ulysses")]
IN_BF16 += ["--dp 2 --ep 2 --experts 8"]


@pytest.mark.parametrize("kind, world_size", _kinds(2))
@pytest.mark.parametrize("layout", IN_BF16)
def test_losses_in_bf16_are_close_to_those_of_one_process_in_fp32(on, kind, world_size, layout):
    if kind == "cpu" and "--cp" in layout:
        pytest.skip("test_context_parallel.py has these on the CPU")
    sizes = [size for size in ("--hidden 64", "--experts 8") if size in layout]
    ((expected, _),) = on("cpu", 1, _watched_steps, " ".join(["--microbatches 1", *sizes]))
    microbatches = 4 if "--pp" in layout else 1
    flags = f"{layout} --dtype bf16 --microbatches {microbatches}"
    for losses, _ in on(kind, world_size, _watched_steps, flags):
        assert losses == pytest.approx(expected, rel=0.01)


# ---- several GPUs: failure -----------------------------------------------------------------------


def _die(device):
    rank, x = dist.get_rank(), torch.ones(1000, device=device)
    collectives.all_reduce(x)
    x.tolist()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    for _ in range(3):
        collectives.all_reduce(x)
        x.tolist()


@pytest.mark.parametrize("kind", SEVERAL)
def test_a_rank_that_waits_for_a_killed_rank_names_it(on, kind):
    environment = {"TORCH_NCCL_BLOCKING_WAIT": "1"}
    survivor, dead = on(kind, 2, _die, environment=environment, check=False)
    assert dead.exitcode == -signal.SIGKILL
    assert survivor.exitcode == 1 and "all_reduce" in survivor.error_text
    assert "rank 0 lost rank 1" in survivor.error_text
