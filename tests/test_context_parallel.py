"""Context parallelism, in sequence_parallel.py: attention over a sequence split among ranks."""

import random
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import sequence_parallel
from collectives import count_bytes, observe, rank_and_size
from ranks import least_bytes, on_ranks, run, shifted
from replicas import assert_close, demonstration, interleaved_group
from reference_gpt import attention
from sequence_parallel import (
    context_parallel_bytes, context_positions, gathered_blocks, ring_block, simple_ring_attention,
    zigzag_allgather_attention, zigzag_ring_attention, zigzag_ulysses_attention,
)
from transformer import Peak, saved_bytes

METHODS = {
    "allgather": zigzag_allgather_attention,
    "ring": zigzag_ring_attention,
    "ulysses": zigzag_ulysses_attention,
}
every_method = pytest.mark.parametrize("method", METHODS)


def _attend(method, tensors, grad, positions, dtype, group=None):
    """Return the output and the gradients for this rank's part of whole tensors."""
    own = [x[:, :, positions].to(dtype).requires_grad_() for x in tensors]
    before = [x.detach().clone() for x in own]
    output = METHODS.get(method, method)(*own, group)
    local_grad = grad[:, :, positions].to(dtype)
    output.backward(local_grad)
    assert all(map(torch.equal, own, before)), "an input was changed"
    return [output.detach(), *[x.grad for x in own]]


def _reference(tensors, grad):
    whole = [x.double().clone().requires_grad_() for x in tensors]
    output = attention(*whole)
    output.backward(grad.double())
    return [output.detach(), *[x.grad for x in whole]]


def test_a_sequence_without_tokens_and_an_unknown_method_are_refused():
    with pytest.raises(ValueError, match="method='Ring' is not 'allgather', 'ring' or 'ulysses'"):
        context_parallel_bytes("Ring", 1, 8, 2, 2, 4, 2)
    with pytest.raises(ValueError, match="seq_len=0 is not 4 equal chunks for cp=2"):
        sequence_parallel._check_chunks(0, 2)


@on_ranks(1, 2, 3)
def test_the_short_form_of_a_ring_agrees_with_attention_on_one_rank():
    rank, P = rank_and_size()
    torch.manual_seed(shifted(0))
    q, k, v = torch.randn(3, 2, 4, 5 * P, 3, dtype=torch.float64)  # K < T/P
    own = [x.chunk(P, 2)[rank] for x in (q, k, v)]
    with torch.no_grad():
        found = simple_ring_attention(*own)
    assert_close(found, attention(q, k, v).chunk(P, 2)[rank])
    with pytest.raises(AssertionError, match="its backward would be wrong"):
        simple_ring_attention(*own)  # autograd would not follow its messages


@pytest.mark.parametrize("P, replicas", [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2)])
@every_method
@on_ranks(lambda P, replicas, **_: P * replicas)
def test_output_and_gradients_are_those_of_full_attention(method, P, replicas):
    """With replicas, two groups run side by side."""
    group, replica = interleaved_group(P, replicas)
    for case in range(10):
        torch.manual_seed(shifted(100 * replica + case))
        sizes = random.Random(shifted(case))
        B, T, K = sizes.randint(1, 3), 2 * P * sizes.randint(1, 5), sizes.choice([4, 8])
        KV = sizes.choice([1, max(1, P // 2), P, 2 * P])  # fewer heads of keys than ranks, too
        H = KV * P * sizes.randint(1, 2)
        shapes = [(B, heads, T, K) for heads in (H, KV, KV, H)]
        q, k, v, grad = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
        tolerance = 1e-10
        if sizes.random() < 0.3:  # scores of +-1e4 do not overflow, but lose digits
            q, tolerance = q * 1e4, 1e-7
        positions = context_positions(T, group)
        found = _attend(method, (q, k, v), grad, positions, torch.float64, group)
        for part, whole in zip(found, _reference((q, k, v), grad)):
            assert part.isfinite().all()
            error = tolerance * whole.abs().max().clamp(min=1).item()
            torch.testing.assert_close(part, whole[:, :, positions], rtol=tolerance, atol=error)


@every_method
@on_ranks(2, 4)
def test_bf16_is_as_exact_as_full_attention_in_bf16(method):
    """Parts are rounded before they are merged or summed, and the result is rounded again."""
    _, P = rank_and_size()
    torch.manual_seed(shifted(0))
    B, H, KV, T, K = 2, 4, 2, 64 * P, 16
    tensors = [torch.randn(B, heads, T, K).bfloat16() for heads in (H, KV, KV)]
    grad = torch.randn(B, H, T, K).bfloat16()
    exact, positions = _reference(tensors, grad), context_positions(T)
    found = _attend(method, tensors, grad, positions, torch.bfloat16)
    single = [x.clone().requires_grad_() for x in tensors]
    y = F.scaled_dot_product_attention(*single, is_causal=True, enable_gqa=True)
    y.backward(grad)
    error = lambda part, whole: (part.double() - whole[:, :, positions]).norm()
    for part, alone, whole in zip(found, [y, *[x.grad for x in single]], exact):
        assert part.dtype == torch.bfloat16
        assert error(part, whole) <= 2**0.5 * error(alone[:, :, positions], whole)


@every_method
@on_ranks(2)
def test_tensors_may_have_any_strides_and_errors_name_shapes_that_do_not_fit(method):
    """Under autocast, q, k and v may have different dtypes."""
    _, P = rank_and_size()
    torch.manual_seed(shifted(0))
    q, k, v = (torch.randn(2, 4, 2 * P, 8) for _ in range(3))
    expected = METHODS[method](q, k, v)
    strided = torch.stack([q, q], -1)[..., 0], k.contiguous(memory_format=torch.channels_last)
    assert_close(METHODS[method](*strided, v.mT.contiguous().mT), expected, 1e-5)
    with torch.autocast("cpu", torch.bfloat16):
        assert METHODS[method](q, k, v.bfloat16()).dtype == torch.bfloat16
    wrong = {
        "cannot be dealt out|only heads may differ": (q[:, :3], k[:, :2], v[:, :2]),
        "only heads may differ": (q, k, v[:, :2]),
        r"q, k and v are \(2, 4, 4, 8\)": (q, k[:, :, :1], v[:, :, :1]),
        "bfloat16": (q, k.bfloat16(), v),
        "seq_len=6 is not 4 equal chunks for cp=2": [x[:, :, :3] for x in (q, k, v)],
    }
    if method == "ulysses":
        wrong["heads=3 and kv_heads=3 .* cp=2"] = 3 * [torch.zeros(1, 3, 4, 4)]
    for message, tensors in wrong.items():
        with pytest.raises(ValueError, match=message):
            METHODS[method](*tensors)


# ---- the work of each rank -----------------------------------------------------------------------


@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("P, T", [(1, 6), (2, 4), (2, 20), (3, 18), (4, 24), (8, 16)])
def test_blocks_cover_each_pair_under_the_mask_once_and_ranks_have_equal_work(P, T, gathered):
    chunks = np.split(np.arange(T), 2 * P)
    keys = [[*chunks[rank], *chunks[-1 - rank]] for rank in range(P)]
    for rank, queries in enumerate(keys):
        steps = [(keys[source], [ring_block(rank, source, T // P)]) for source in range(P)]
        if gathered:
            steps = [(range(T), gathered_blocks(rank, P, T // P))]
        pairs = []
        for seen, blocks in steps:
            before = len(pairs)
            for rows, columns, causal in blocks:
                rows, columns = queries[rows], seen[columns]
                assert not causal or list(rows) == list(columns)
                pairs += [(q, k) for q in rows for k in columns if k <= q or not causal]
            if not gathered and seen != queries:  # each step of a ring has equal work
                assert len(pairs) - before == (T // P) ** 2 // 2
        assert sorted(pairs) == [(q, k) for q in sorted(queries) for k in range(q + 1)]
        assert len(pairs) == T * (T + 1) // 2 // P or T * (T + 1) // 2 % P


# ---- bytes on the wire ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@every_method
@on_ranks(1, 2, 3, 4)
def test_every_method_sends_what_its_formula_says(method, dtype):
    _, P = rank_and_size()
    B, H, KV, T, K = 2, 12, 3 if P == 3 else 2, 24, 8
    shapes = [(B, heads, T // P, K) for heads in (H, KV, KV)]
    q, k, v = (torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)
    with least_bytes(), count_bytes() as traffic:
        y = METHODS[method](q, k, v)
        forward = traffic.bytes()
        y.sum().backward()
    claimed = context_parallel_bytes(method, B, T, H, KV, K, P, itemsize=dtype.itemsize)
    assert (forward, traffic.bytes() - forward) == claimed


@on_ranks(3)
def test_the_demonstration_prints_what_the_table_says():
    """A line for an MLP, then for each method in plain order, then in zig-zag order."""
    _, P = rank_and_size()
    of_mlp, *lines = demonstration(sequence_parallel).splitlines()
    mlp = 4 * (P - 1) * 64 * 2 * 16 * P * 8
    kv = 2 * (P - 1) * 256 * 2 * P * 16 * 8
    expected = {"allgather": [kv, kv], "ring": [kv, 2 * kv], "ulysses": [2 * kv // P, 2 * kv // P]}
    assert f"claimed {mlp}, counted {mlp}" in of_mlp
    names = [f"{order}_{name}" for order in ("simple", "zigzag") for name in expected]
    for name, line in zip(names, lines, strict=True):
        nbytes = expected[name.split("_")[1]]
        nbytes = nbytes[:1] if name == "simple_ring" else nbytes  # it has no backward
        assert line.startswith(name) and f"claimed {nbytes}, counted {nbytes}" in line
    assert all(float(line.split()[-1]) < 1e-12 for line in (of_mlp, *lines))


@on_ranks(3)
def test_a_ring_computes_while_keys_values_and_their_gradients_travel():
    log = []
    note = lambda right: lambda *given: log.append("compute") or right(*given)
    listen = lambda event, operation, *_: log.extend(
        {"begin": [operation.name], "wait": ["wait"]}.get(event, [])
    )
    kernels = ("block_attention", "block_attention_backward")
    noted = {name: note(getattr(sequence_parallel, name)) for name in kernels}
    q, k, v = torch.randn(3, 1, 2, 8, 4, requires_grad=True)
    with observe(listen), patch.multiple(sequence_parallel, **noted):
        y = zigzag_ring_attention(q, k, v)
        assert log == ["exchange", "compute", "wait"] * 2 + ["compute"]
        log.clear()
        y.sum().backward()  # the first visit, of this rank's own keys and values, is skipped
    middle = ["exchange", "compute", "exchange", "wait", "compute", "wait", "exchange"]
    assert log == ["exchange", "wait", *middle, "compute", "wait"]


# ---- kernels of a GPU, on pretended tensors ------------------------------------------------------


@pytest.mark.parametrize("dtype, name", [(torch.bfloat16, "flash"), (torch.float32, "efficient")])
def test_on_a_gpu_bf16_takes_the_flash_attention_kernel_and_fp32_the_efficient_kernel(dtype, name):
    kernels = []

    class Kernels(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if "attention" in str(function):
                heads = {x.shape[1] for x in args if torch.is_tensor(x) and x.ndim == 4}
                kernels.append((str(function), len(heads)))
            return function(*args, **(kwargs or {}))

    with FakeTensorMode(), Kernels():
        make = lambda heads, length: torch.empty(2, heads, length, 64, device="cuda", dtype=dtype)
        q, k, v = make(8, 33), make(2, 40), make(2, 40)
        output, lse = sequence_parallel.block_attention(q, k, v, False)
        grads = sequence_parallel.block_attention_backward(output, q, k, v, output, lse, False)
    assert lse.shape == (2, 8, 33) and lse.dtype == torch.float32
    assert [x.shape for x in (output, *grads)] == [x.shape for x in (q, q, k, v)]
    assert {x.dtype for x in (output, *grads)} == {dtype}
    assert [name in kernel for kernel, _ in kernels] == [True, True]
    # Only flash attention takes q and k with different numbers of heads.
    assert {heads for _, heads in kernels} == {1 if name == "efficient" else 2}


# ---- memory --------------------------------------------------------------------------------------


@every_method
@on_ranks(2)
def test_for_backward_a_rank_keeps_its_queries_and_outputs_and_the_keys_of_the_table(method):
    """Keys and values keep their number of heads. An lse has a number per query and head."""
    _, P = rank_and_size()
    B, H, KV, T, K = 2, 8, 2, 32, 16
    q, k, v = (torch.randn(B, heads, T // P, K, requires_grad=True) for heads in (H, KV, KV))
    with saved_bytes() as count:
        METHODS[method](q, k, v)
    kv = (k.nbytes + v.nbytes) * (P if method == "allgather" else 1)
    assert count() == 2 * q.nbytes + kv + q.nbytes // K


def _peak_bytes(method, T):
    _, P = rank_and_size()
    q, k, v = (torch.randn(1, 4, T // P, 16, requires_grad=True) for _ in range(3))
    METHODS[method](q, k, v).sum().backward()
    with Peak() as peak:
        METHODS[method](q, k, v).sum().backward()
    return peak.bytes


def test_a_ranks_peak_memory_is_inverse_to_the_ranks_and_linear_in_the_sequence():
    peak = lambda *size: max(run(size[0], _peak_bytes, *size[1:]))
    for method in ("ring", "ulysses"):
        half, whole = peak(2, method, 512), peak(2, method, 1024)
        # Four ranks of a ring have keys and values of another rank under way, and two have not.
        under_way = 2 * 4 * (1024 // 4) * 16 * 4  # bytes of one rank's keys and values
        assert peak(4, method, 1024) <= whole / 2 + under_way
        assert whole <= 2.05 * half
        assert whole < 4 * 1024 * 1024  # the bytes of one head's scores
    assert peak(4, "allgather", 1024) <= 2.05 * peak(4, "allgather", 512)
