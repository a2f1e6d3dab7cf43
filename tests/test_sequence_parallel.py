"""Sequence parallelism and recomputation: gradients of one process, bytes of activations."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hybrid
from collectives import count_bytes, rank_and_size
from ranks import least_bytes, run
from sequence_parallel import (
    activation_bytes,
    dropout,
    gather_linear,
    make_weights,
    norm_bytes,
    recompute,
    saved_bytes,
    transformer_layer,
    unfused_attention,
)
from tensor_parallel import tensor_parallel_layer_bytes

MODES = ["none", "selective", "full"]
every_size = pytest.mark.parametrize("tp", [1, 2, 3, 4, 6])


# ---- a layer against one process -----------------------------------------------------------------


class PlainLayer(nn.Module):
    """What transformer_layer() computes, in torch.nn; parameters in the same order."""

    def __init__(self, D, heads):
        super().__init__()
        self.heads = heads
        self.norm1, self.qkv, self.out = nn.LayerNorm(D), nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.norm2, self.up, self.down = nn.LayerNorm(D), nn.Linear(D, 4 * D), nn.Linear(4 * D, D)

    def forward(self, x):
        split = lambda y: y.unflatten(-1, (self.heads, -1)).permute(1, 2, 0, 3)  # (B, H, T, K)
        q, k, v = map(split, self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.permute(2, 0, 1, 3).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def _own(tensor, dim, blocks=1):
    rank, tp = rank_and_size()
    parts = [block.chunk(tp, dim)[rank] for block in tensor.chunk(blocks, dim)]
    return torch.cat(parts, dim).detach().clone()


def _shards(tensors):
    """This rank's parts of a plain layer's parameters, or of their gradients."""
    n1, b1, qkv, bqkv, out, bout, n2, b2, up, bup, down, bdown = tensors
    qkv, bqkv = _own(qkv, 0, 3), _own(bqkv, 0, 3)
    split = [_own(up, 0), _own(bup, 0), _own(down, 1), bdown]
    return [n1, b1, qkv, bqkv, _own(out, 1), bout, n2, b2, *split]


def _layer(dtype=torch.float64):
    _, tp = rank_and_size()
    B, T, D, heads = 2, 2 * tp, 4 * tp, 2 * tp
    torch.manual_seed(0)
    plain = PlainLayer(D, heads).to(dtype)
    for parameter in plain.parameters():
        nn.init.normal_(parameter, std=0.5)
    return plain, torch.randn(T, B, D, dtype=dtype), torch.randn(T, B, D, dtype=dtype), heads


def _compare():
    plain, x, grad, heads = _layer()
    whole = x.clone().requires_grad_()
    expected = plain(whole)
    expected.backward(grad)
    expected_grads = _shards([parameter.grad for parameter in plain.parameters()])
    for sequence_parallel in (False, True):
        own = (lambda full: _own(full, 0)) if sequence_parallel else torch.clone
        for mode in MODES:
            weights = _shards([parameter.detach().clone() for parameter in plain.parameters()])
            weights = [weight.requires_grad_() for weight in weights]
            local = own(x).requires_grad_()
            options = {"sequence_parallel": sequence_parallel, "mode": mode}
            found = transformer_layer(local, weights, heads, 0.0, **options)
            found.backward(own(grad))
            assert_close = lambda a, b: torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)
            assert_close(found, own(expected.detach()))
            assert_close(local.grad, own(whole.grad))
            for place, (weight, correct) in enumerate(zip(weights, expected_grads)):
                if sequence_parallel and place in (0, 1, 5, 6, 7, 11):  # norms, biases after a sum
                    torch.distributed.all_reduce(weight.grad)
                assert_close(weight.grad, correct)


@every_size
def test_a_layer_is_that_of_one_process_split_or_recomputed_in_any_way(tp):
    run(tp, _compare)


# ---- recomputation -------------------------------------------------------------------------------


def _dropout_again(sequence_parallel):
    """With dropout, every mode has the same bits, and leaves the generators in the same state."""
    _, tp = rank_and_size()
    weights, results = make_weights(4 * tp, tp, torch.float32), []
    x = torch.randn(2 * tp, 2, 4 * tp)
    for mode in MODES:
        torch.manual_seed(7)
        leaves = [tensor.detach().clone().requires_grad_() for tensor in (x, *weights)]
        y = transformer_layer(leaves[0], leaves[1:], 2 * tp, 0.3, None, sequence_parallel, mode)
        y.sin().sum().backward()
        results.append([y, *[leaf.grad for leaf in leaves], torch.rand(2)])
    for other in results[1:]:
        assert all(map(torch.equal, results[0], other))


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_recomputation_replays_dropout(sequence_parallel):
    run(2, _dropout_again, sequence_parallel)


def test_recomputation_runs_under_the_autocast_of_forward():
    linear, x = nn.Linear(8, 8), torch.randn(4, 8)
    grads = []
    for function in (linear, lambda x: recompute(linear, x)):
        linear.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            y = function(x.requires_grad_())
        assert y.dtype == torch.bfloat16
        y.sum().backward()
        grads.append(linear.weight.grad.clone())
    assert torch.equal(*grads)


def test_recomputation_without_a_gradient_to_come_is_an_error():
    linear, x = nn.Linear(3, 3), torch.randn(2, 3)
    with pytest.raises(ValueError, match="none of which requires a gradient"):
        recompute(linear, x)
    with torch.no_grad():
        assert torch.equal(recompute(linear, x), linear(x))


def test_what_recomputation_cannot_do_is_an_error_and_leaves_no_gradient():
    linear, x = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"leaves gradients in \.grad"):
        torch.autograd.grad(recompute(linear, x).sum(), x)
    with pytest.raises(RuntimeError, match=r"leaves gradients in \.grad"):
        recompute(linear, x).sum().backward(inputs=[x])
    assert x.grad is linear.weight.grad is None
    with pytest.raises(ValueError, match="returns a tuple"):
        recompute(lambda x: (x, x), x)
    with pytest.raises(ValueError, match="not tensors: float, NoneType"):
        recompute(lambda x, *others: x, x, 0.5, None)


def test_a_recomputed_function_runs_twice_and_keeps_its_inputs_only():
    runs, x, y = [], torch.randn(5, 3, requires_grad=True), torch.randn(5, 3)

    def function(x, y):
        runs.append(torch.is_grad_enabled())
        return (x.exp() * y).sin().sum()

    with saved_bytes() as count:
        output = recompute(function, x, y)
        kept = count()
    output.backward()
    assert runs == [False, True] and kept == x.nbytes + y.nbytes
    torch.testing.assert_close(x.grad, (x.exp() * y).cos() * y * x.exp())


# ---- activation memory ---------------------------------------------------------------------------

SIZES = (2, 24, 48, 12)  # batch, sequence, width, heads: 1, 2, 3, 4 and 6 divide them


def _kept(sequence_parallel, mode):
    """Bytes that autograd keeps of transformer_layer()."""
    _, tp = rank_and_size()
    B, T, D, H = SIZES
    weights = make_weights(D, tp)
    x = torch.randn(T // tp if sequence_parallel else T, B, D, dtype=torch.bfloat16)
    with saved_bytes(weights) as count:
        transformer_layer(x.requires_grad_(), weights, H, 0.1, None, sequence_parallel, mode)
    return count()


def _kept_by_hybrid(sequence_parallel, mode, attention_fn=unfused_attention, T=SIZES[1], p=0.1):
    """The same of hybrid's layer, whose matrices are those of tensor_parallel.py."""
    _, tp = rank_and_size()
    B, _, D, H = SIZES
    config = hybrid.GPTConfig(1, D, H, T, 64, p, None, sequence_parallel, mode)
    random = hybrid.ShardedRandomState("cpu")
    block = hybrid.Block(config, random, attention_fn, group=None).bfloat16()
    x = torch.randn(T // tp if sequence_parallel else T, B, D, dtype=torch.bfloat16)
    with saved_bytes(block.parameters()) as count:
        x.requires_grad_()
        recompute(block, x) if mode == "full" else block(x)
    return count()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("measure", [_kept, _kept_by_hybrid])
@every_size
def test_a_layer_keeps_the_bytes_of_the_paper_and_the_statistics_of_its_norms(
    tp, measure, sequence_parallel, mode
):
    B, T, D, H = SIZES
    claimed = activation_bytes(B, T, D, H, tp, sequence_parallel, mode)
    norms = norm_bytes(B, T, tp, sequence_parallel, mode)
    assert norms <= 0.05 * claimed
    kept = run(tp, measure, sequence_parallel, mode)
    assert kept == pytest.approx([claimed + norms] * tp, rel=1e-12)


def test_the_rows_of_the_table():
    s, b, h, a, t = 2048, 4, 12288, 96, 8
    row = lambda *mode: activation_bytes(b, s, h, a, t, *mode) / (s * b * h)
    scores = 5 * a * s / h
    assert activation_bytes(b, s, h, a) / (s * b * h) == 34 + scores
    assert row() == 10 + 24 / t + scores / t
    assert row(True) == pytest.approx(34 / t + scores / t)
    assert row(False, "selective") == 10 + 24 / t
    assert row(True, "selective") == pytest.approx(34 / t)
    assert row(False, "full") == 2


def test_fused_attention_keeps_no_scores():
    """Without dropout of scores; what is left grows as the sequence does."""
    B, T, D, H = SIZES
    for tp in (1, 2):
        measure = lambda fn, k: run(tp, _kept_by_hybrid, True, "none", fn, k * T, 0.0)[0]
        kept = [measure(hybrid.attention, k) for k in (1, 2, 4)]
        unfused = [measure(unfused_attention, k) for k in (1, 2)]
        assert kept[1] == 2 * kept[0] and kept[2] == 4 * kept[0]
        assert unfused[1] > 2 * unfused[0]
        log_sum_exp, masks = 4 * B * T * H // tp, 2 * B * T * D // tp
        claimed = activation_bytes(B, T, D, H, tp, True, "selective") - masks + log_sum_exp
        assert kept[0] == claimed + norm_bytes(B, T, tp, True)


def _kept_by_gpt(layers, mode):
    B, T, D, H = SIZES
    config = hybrid.GPTConfig(layers, D, H, T, 64, 0.1, None, True, mode)
    random = hybrid.ShardedRandomState("cpu")
    model = hybrid.GPT(config, None, random=random, attention_fn=unfused_attention).bfloat16()
    with saved_bytes(model.parameters()) as count:
        model(torch.zeros(B, T, dtype=torch.int64))
    return count()


@pytest.mark.parametrize("mode", MODES)
def test_each_layer_of_a_gpt_adds_the_bytes_of_the_paper(mode):
    B, T, D, H = SIZES
    claimed = activation_bytes(B, T, D, H, 2, True, mode) + norm_bytes(B, T, 2, True, mode)
    for fewer, more in zip(run(2, _kept_by_gpt, 2, mode), run(2, _kept_by_gpt, 3, mode)):
        assert more - fewer == claimed


# ---- bytes on the wire ---------------------------------------------------------------------------


def _sent(sequence_parallel, mode):
    _, tp = rank_and_size()
    B, T, D, H = SIZES
    weights = make_weights(D, tp, torch.float32)
    x = torch.randn(T // tp if sequence_parallel else T, B, D, requires_grad=True)
    with least_bytes(), count_bytes() as traffic:
        transformer_layer(x, weights, H, 0.0, None, sequence_parallel, mode).sum().backward()
    return traffic.bytes()


@every_size
def test_a_layer_sends_8_b_s_h_or_10_in_parts_and_half_of_8_more_if_all_is_recomputed(tp):
    B, T, D, _ = SIZES
    forward = 4 * 4 * B * T * D * (tp - 1) // tp
    for sequence_parallel in (False, True):
        claimed = tensor_parallel_layer_bytes(B, T, D, tp, 4, sequence_parallel)
        for mode in MODES:
            again = forward if mode == "full" else 0
            assert run(tp, _sent, sequence_parallel, mode) == [claimed + again] * tp


def _gathered_alike():
    """The simple linear and that of tensor_parallel.py."""
    _, tp = rank_and_size()
    results = []
    for function in (gather_linear, hybrid.parallel_linear):
        torch.manual_seed(1)
        leaves = [torch.randn(*s).requires_grad_() for s in ((3, 2, 5), (4, 5), (4,))]
        options = {} if function is gather_linear else {"sequence_parallel": True}
        y = function(*leaves, None, **options)
        assert y.shape == (3 * tp, 2, 4)
        y.sin().sum().backward()
        results.append([y] + [leaf.grad for leaf in leaves])
    assert all(map(torch.equal, *results))


def test_both_linears_of_a_sequence_in_parts_have_the_same_bits():
    run(3, _gathered_alike)


def test_dropout_keeps_a_mask_of_a_byte_and_scales_what_is_left():
    x = torch.ones(1000, dtype=torch.bfloat16, requires_grad=True)
    with saved_bytes() as count:
        y = dropout(x, 0.5)
    assert count() == 1000 and set(y.tolist()) == {0.0, 2.0}
    assert dropout(x, 0.5, training=False) is x and dropout(x, 0.0) is x
