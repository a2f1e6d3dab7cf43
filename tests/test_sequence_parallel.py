"""Sequence parallelism and recomputation keep one process's gradients, and the papers' bytes."""

import math
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import exercises
import hybrid
import sequence_parallel
from collectives import all_reduce, gather_objects, rank_and_size
from ranks import on_ranks, shifted, soak
from replicas import assert_close, code_below
from sequence_parallel import (
    activation_bytes, dropout, recomputation_bytes, recompute, sequence_parallel_block,
    sequence_parallel_mlp,
)
from tensor_parallel import attention
from transformer import (
    Peak, TransformerLayer, most_saved_bytes, norm_bytes, saved_bytes, unfused_attention,
)

MODES = ["none", "selective", "full"]
every_mode = pytest.mark.parametrize("mode", MODES)
split_or_not = pytest.mark.parametrize("sequence_parallel", [False, True])

# test_tensor_parallel.py compares TransformerLayer, in every mode, with a layer of one process.


@on_ranks(1, 3)
def test_the_short_form_of_an_mlp_agrees_with_the_real_one():
    rank, P = rank_and_size()
    layer, found = TransformerLayer(4 * P, P, sequence_parallel=True).double(), []
    up, down = layer.mlp.c_fc, layer.mlp.c_proj
    weights = [*layer.ln_2.parameters(), up.weight, down.weight]
    x = torch.randn(3 * P, 2, 4 * P, dtype=torch.float64).chunk(P)[rank].requires_grad_()
    real = x + layer.mlp(layer.ln_2(x))
    for y in (real, sequence_parallel_mlp(x, layer.ln_2, up.weight, down.weight)):
        found.append([y, *torch.autograd.grad(y.sin().sum(), [x, *weights])])
    for one, other in zip(*found):
        assert_close(one, other)


@on_ranks(soak(1), 2, soak(3))
def test_the_step_that_opens_the_file_is_that_of_one_process():
    """The comment's code runs as it stands: two layers, and all gradients."""
    torch.set_default_dtype(torch.float64)
    rank, P = rank_and_size()
    T, B, D, K, vocabulary = 3 * P, 2, 4 * P, 2, 7
    draw = lambda *shape: torch.randn(shape).mul_(0.3).requires_grad_()
    embedding = nn.Embedding(vocabulary, D)
    norm, *norms = [nn.LayerNorm(D) for _ in range(5)]
    copies = [p for module in (embedding, norm, *norms) for p in module.parameters()]
    tokens, targets = torch.randint(vocabulary, (2, T, B))
    matrices = [(draw(3, D, D), draw(D, D), draw(4 * D, D), draw(D, 4 * D)) for _ in range(2)]
    first = lambda x: x.transpose(0, 1)
    x = embedding(tokens)
    for i, (qkv, out, up, down) in enumerate(matrices):
        x = x + first(exercises.self_attention(first(norms[2 * i](x)), qkv, out, K))
        x = x + exercises.mlp(norms[2 * i + 1](x), up, down)
    logits = norm(x) @ embedding.weight.t()
    losses = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    split = [matrix for of_layer in matrices for matrix in of_layer]
    dims = [1, 1, 0, 1] * 2
    expected = torch.autograd.grad(losses.mean(), [*copies, *split])

    cut = lambda full, dim: full.detach().chunk(P, dim)[rank].clone()
    parts = [part.requires_grad_() for part in map(cut, split, dims)]
    layers = []
    for i in range(2):
        qkv, out, up, down = parts[4 * i :][:4]
        of_layer = {"norm_1": norms[2 * i], "norm_2": norms[2 * i + 1]}
        layers.append(SimpleNamespace(**of_layer, qkv=qkv, out=out, up=up, down=down))
    (step,) = code_below(sequence_parallel, "# ---- sequence parallelism: the idea")
    names = dict(vars(sequence_parallel), rank=rank, t=P, tokens=tokens, targets=targets, K=K)
    names |= {"embedding": embedding, "layers": layers, "norm": norm, "copies": copies}
    exec(step, names)
    loss = names["loss"].detach()
    all_reduce(loss)
    assert_close(loss, losses.sum())
    of_parts = list(map(cut, expected[len(copies) :], dims))
    for parameter, grad in zip([*copies, *parts], [*expected[: len(copies)], *of_parts]):
        assert_close(parameter.grad, grad)


@on_ranks(2)
def test_the_short_form_drops_elements_of_this_ranks_tokens_after_the_sum():
    rank, P = rank_and_size()
    torch.manual_seed(shifted(rank))  # as the docstring asks for
    x = torch.zeros(50, 2, 4)
    y = sequence_parallel_block(x, nn.Identity(), lambda whole: torch.ones_like(whole) / P, p=0.5)
    assert set(y.unique().tolist()) == {0, 2}  # dropped, and the sum of the ranks' terms, scaled
    first, second = gather_objects(y)
    assert not torch.equal(first, second)


@on_ranks(2)
def test_the_short_form_drops_nothing_of_what_passes_beside_the_layer():
    x = torch.arange(1.0, 401.0).view(50, 2, 4)
    assert torch.equal(sequence_parallel_block(x, nn.Identity(), torch.zeros_like, p=0.5), x)


# ---- recomputation -------------------------------------------------------------------------------


def test_unsupported_uses_of_recomputation_raise_and_leave_no_gradient():
    linear, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"\.grad\(\)"):
        torch.autograd.grad(recompute(linear, x).sum(), x)
    with pytest.raises(RuntimeError, match="`inputs` parameter"):
        recompute(linear, x).sum().backward(inputs=[x])
    assert x.grad is linear.weight.grad is None
    with pytest.raises(ValueError, match="no input of recompute"):
        recompute(linear, x.detach())
    with torch.no_grad():
        assert torch.equal(recompute(linear, x), linear(x))


@pytest.mark.parametrize("autocast", [False, True])
def test_a_recomputed_function_runs_twice_in_the_same_way_and_keeps_only_its_inputs(autocast):
    runs, linear, x, y = [], nn.Linear(3, 3), torch.randn(5, 3), torch.randn(5, 3)

    def function(x, y):
        runs.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")))
        return (linear(x) * y).sin()

    grads, dtype = [], torch.bfloat16 if autocast else torch.float32
    for run in (function, partial(recompute, function)):
        own = x.clone().requires_grad_()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast), saved_bytes() as count:
            output = run(own, y.to(dtype))
        assert output.dtype == dtype
        output.sum().backward()
        grads.append([own.grad, linear.weight.grad])
        linear.zero_grad()
    assert runs == [(True, autocast), (False, autocast), (True, autocast)]
    assert count() == x.nbytes + y.to(dtype).nbytes and all(map(torch.equal, *grads))


@on_ranks(1)
def test_the_recomputed_output_takes_no_memory():
    layer, x, peaks = TransformerLayer(64, 4), torch.randn(64, 2, 64, requires_grad=True), []
    for again in (partial(checkpoint, use_reentrant=True), recompute):
        again(layer, x).sum().backward()
        with Peak() as peak:
            y = again(layer, x)
            y.sum().backward()
        peaks.append(peak.bytes)
    assert peaks[0] - peaks[1] > 0.9 * y.nbytes


# ---- activation memory ---------------------------------------------------------------------------

SIZES = (2, 24, 48, 12)  # batch, sequence, width, heads; every tp divides the last three


def _kept(layer, T):
    """Return the bytes that autograd keeps of a layer with T positions, in bf16."""
    B, _, D, _ = SIZES
    x = torch.randn(T, B, D, dtype=torch.bfloat16, requires_grad=True)
    with saved_bytes(layer.bfloat16().parameters()) as count:
        layer(x)
    return count()


@every_mode
@split_or_not
@on_ranks(1, 2, 3, 4, 6)
def test_a_layer_keeps_the_bytes_of_the_paper_and_the_statistics_of_its_norms(
    sequence_parallel, mode
):
    (B, T, D, H), (_, tp) = SIZES, rank_and_size()
    claimed = activation_bytes(B, T, D, H, tp, sequence_parallel, mode)
    norms = norm_bytes(B, T, tp, sequence_parallel, mode)
    assert norms <= 0.05 * claimed
    config = hybrid.GPTConfig(1, D, H, T, 64, 0.1, sp=sequence_parallel, recompute=mode)
    state = hybrid.ShardedRandomState("cpu")
    parallel = hybrid.Parallel(random=state, attention_fn=unfused_attention)
    block = hybrid.Block(config, parallel)
    block.forward = partial(recompute, block.forward) if mode == "full" else block.forward
    layer = TransformerLayer(D, H, p=0.1, mode=mode, sequence_parallel=sequence_parallel)
    for kind in (layer, block):
        kept = _kept(kind, T // tp if sequence_parallel else T)
        assert kept == pytest.approx(claimed + norms, rel=1e-12)


@pytest.mark.parametrize("microbatches", [soak(1), 3])
@split_or_not
@on_ranks(soak(1), 2)
def test_a_stage_keeps_the_inputs_of_its_groups_and_one_whole_group(
    sequence_parallel, microbatches
):
    """All microbatches go forward, as in GPipe. Of 6 layers, groups of 4 leave a last one of 2."""
    (B, T, D, H), (_, tp), L = SIZES, rank_and_size(), 6
    bytes_of = lambda mode: activation_bytes(B, T, D, H, tp, sequence_parallel, mode)
    whole_layer = bytes_of("none") + norm_bytes(B, T, tp, sequence_parallel)
    state = hybrid.ShardedRandomState("cpu")
    parallel = hybrid.Parallel(random=state, attention_fn=unfused_attention)
    for size in range(1, L + 1) if tp == 1 else [4]:
        how = {"sp": sequence_parallel, "recompute": "full", "recompute_layers": size}
        config = hybrid.GPTConfig(3 * L, D, H, T, 2, 0.1, **how)
        stage = hybrid.GPT(
            config, parallel, torch.arange(T), range(L, 2 * L), is_first=False, is_last=False
        ).bfloat16()
        shape = T // tp if sequence_parallel else T, B, D
        xs = [torch.randn(shape, dtype=torch.bfloat16) for _ in range(microbatches)]
        with most_saved_bytes(stage.parameters()) as count:
            for y in [stage(x.requires_grad_()) for x in xs]:
                y.sum().backward()
        claimed = recomputation_bytes(L, size, bytes_of("full"), whole_layer, microbatches)
        assert count() == pytest.approx(claimed, rel=1e-12), size


def test_the_least_memory_is_at_the_square_root_of_layers_times_input_over_layer():
    L, N, K, M = 144, 64, 4, 8
    for a, m in ((1, 1), (4, 1), (1, 4), (16, 4)):
        divisors = [n for n in range(1, L + 1) if L % n == 0]
        cost = {n: recomputation_bytes(L, n, 1, a, m) for n in divisors}
        n = math.isqrt(m * L // a)  # sqrt(L) if a = c = 1
        assert min(cost, key=cost.get) == n and cost[n] == 2 * math.isqrt(m * L * a) - 1
    # GPipe recomputes whole stages.
    stage = recomputation_bytes(L // K, L // K, N // M, N // M, M)
    assert stage == N + L // K * N // M - N // M
    whole = recomputation_bytes(10, 4, 3, 7)  # groups of 4, 4 and 2
    assert whole == max(2 * 3 + 2 * 7, 1 * 3 + 4 * 7)
    assert recomputation_bytes(4, 3, 5, 5) == 5 + max(5, 10)  # while the last one is recomputed
    assert recomputation_bytes(2, 4, 3, 7) == recomputation_bytes(2, 2, 3, 7) == 2 * 7  # one group


def test_activation_bytes_are_the_rows_of_the_papers_table():
    s, b, h, a, t = 2048, 4, 12288, 96, 8
    row = lambda *mode: activation_bytes(b, s, h, a, t, *mode) / (s * b * h)
    scores = 5 * a * s / h
    assert activation_bytes(b, s, h, a) / (s * b * h) == 34 + scores
    assert activation_bytes(b, s, h, a, masks=False) / (s * b * h) == 32 + 2 * a * s / h
    assert row() == 10 + 24 / t + scores / t and row(False, "selective") == 10 + 24 / t
    assert row(True) == pytest.approx(34 / t + scores / t)
    assert row(True, "selective") == pytest.approx(34 / t) and row(False, "full") == 2
    assert activation_bytes(b, s, h, a, t, True, "full", itemsize=4) == 4 * s * b * h / t


@on_ranks(1, 2)
def test_fused_attention_keeps_no_scores():
    """Scores have no dropout here. What is kept is proportional to the sequence's length."""
    (B, T, D, H), (_, tp) = SIZES, rank_and_size()
    layer = lambda core: TransformerLayer(D, H, attention_fn=core, sequence_parallel=True)
    bytes_of = lambda core, k: _kept(layer(core), k * T // tp)
    assert bytes_of(unfused_attention, 2) > 2 * bytes_of(unfused_attention, 1)
    log_sum_exp, masks = 4 * B * T * H // tp, 2 * B * T * D // tp
    claimed = activation_bytes(B, T, D, H, tp, True, "selective") - masks + log_sum_exp
    for k in (1, 2, 4):
        assert bytes_of(attention, k) == k * (claimed + norm_bytes(B, T, tp, True))


def test_dropout_keeps_one_byte_per_element_and_scales_the_others():
    x = torch.ones(1000, dtype=torch.bfloat16, requires_grad=True)
    with saved_bytes() as count:
        y = dropout(x, 0.5)
    assert count() == 1000 and set(y.tolist()) == {0.0, 2.0}
    assert dropout(x, 0.5, training=False) is x and dropout(x, 0.0) is x
