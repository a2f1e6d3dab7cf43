"""hybrid.py --rehearse: what it counts is what real ranks do, and its errors are one line."""

import time
from collections import Counter
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

import hybrid
from collectives import count_bytes, observe
from expert_parallel import Router
from ledger import memory_ledger
from ranks import run
from sequence_parallel import saved_bytes
from test_nccl_path import nccl_over_gloo

aten = torch.ops.aten
FORWARD = aten._scaled_dot_product_flash_attention_for_cpu
BACKWARD = aten._scaled_dot_product_flash_attention_for_cpu_backward


def _scores(q, k, causal):
    """FLOPs of attention: of each query with all keys, or with half of them."""
    return 4 * q[0] * q[1] * q[2] * k[2] * q[3] // (1 + causal)


MAPPING = {  # PyTorch's counter does not know these
    FORWARD: lambda q, k, v, p=0, causal=False, **_: _scores(q, k, causal),
    aten.addmm_: lambda z, x, y, **_: 2 * x[0] * x[1] * y[1],
    aten._grouped_mm: lambda x, y, *_, **__: 2 * x[0] * x[1] * y[-1],
    BACKWARD: lambda grad, q, k, v, o, lse, p, causal, **_: 2 * _scores(q, k, causal),
}
SIZES = "--layers 2 --hidden 32 --heads 4 --seq-len 32 --vocab-size 67 --batch-size 16"
LAYOUTS = [
    "--dp 2 --tp 2 --sp --zero 2 --microbatches 2",
    "--layers 4 --pp 4 --microbatches 4 --recompute selective",
    "--dp 4 --ep 4 --ep-nodes 2 --topk-nodes 1 --experts 8 --shared-experts 1 --zero 0",
    "--pp 2 --dp 2 --ep 2 --experts 4 --moe-every 2 --dtype bf16 --microbatches 2",
]
OTHERS = [
    "--dp 4 --zero 0",
    "--dp 4 --zero 1 --microbatches 2 --dtype bf16",
    "--dp 2 --cp 2 --zero 3 --replicate 2",
    "--tp 4 --recompute full --dropout 0.1",
    "--pp 2 --cp 2 --cp-method allgather --schedule zb-h1 --microbatches 4",
    "--layers 4 --pp 2 --tp 2 --schedule zb-v --kv-heads 1 --microbatches 4",
    "--layers 4 --pp 2 --dp 2 --schedule interleaved --microbatches 2 --dtype bf16 --zero 0",
    "--layers 4 --pp 4 --schedule dualpipe --microbatches 8",
    "--dp 2 --cp 2 --cp-method ulysses --ep 4 --experts 8 --balance bias --zero 1",
    "--dp 2 --tp 2 --ep 2 --experts 4 --zero 3 --recompute full --microbatches 2",
]


def even_choice(router, scores):
    """In place of Router.choose(): as many rows for each expert, on --topk-nodes nodes a token."""
    tokens, experts, k = len(scores), scores.shape[1], router.top_k
    if router.topk_group == 1 and router.n_group > 1:
        per_node = experts // router.n_group
        first = torch.arange(tokens) % router.n_group * per_node
        within = torch.arange(tokens) // router.n_group * k
        return first.unsqueeze(1) + (within.unsqueeze(1) + torch.arange(k)) % per_node
    return (torch.arange(tokens * k) % experts).view(tokens, k)


def _names(mesh, counted):
    """{a group's name in Mesh: what is counted of it}, of those with several ranks."""
    several = {n: g for n, g in vars(mesh).items() if g and dist.get_world_size(g) > 1}
    return {name: counted(group) for name, group in several.items()}


def _real(flags, per_node):
    """What a second step does: the first one also learns formats and compares parameters."""
    args = hybrid.parse_args(flags.split(), dist.get_world_size())
    batches = Counter()

    def listen(event, link, *what):
        batches[link.group] += event == "post" and bool(what[1] or what[2])

    def fused(*qkv, dropout_p, whole=torch.nn.functional.scaled_dot_product_attention, **options):
        return whole(*qkv, **options)  # the CPU's has no dropout

    with (
        nccl_over_gloo(),
        patch.object(Router, "choose", even_choice),
        patch.object(torch.nn.functional, "scaled_dot_product_attention", fused),
    ):
        mesh = hybrid.mesh_of(args, per_node)
        trainer = hybrid.Trainer(args, mesh, torch.device("cpu"))
        tokens = torch.zeros(args.batch_size // args.dp, args.seq_len, dtype=torch.int64)
        trainer.step(tokens, tokens)
        flops = FlopCounterMode(display=False, custom_mapping=MAPPING)
        with count_bytes() as traffic, observe(listen), flops:
            trainer.step(tokens, tokens)
    ledger = memory_ledger(trainer.stages, trainer.optimizer)
    messages = _names(mesh, lambda group: (traffic.bytes(group=group), batches[group]))
    return messages, flops.get_total_flops(), dict(ledger)


def _rehearsed(flags, rank, world_size=4, per_node=8):
    flags = f"{flags} --rehearse --rank {rank} --gpus {world_size}"
    try:
        with patch.object(hybrid, "GPUS_PER_NODE", per_node):
            trainer, rehearsal, memory = hybrid.rehearse_step(hybrid.parse_args(flags.split(), 1))
        sent, batches = rehearsal.sent, rehearsal.batches
        messages = _names(trainer.mesh, lambda group: (sent[group], batches[group]))
        return messages, rehearsal.flops, memory
    finally:
        dist.destroy_process_group()


def _assert_alike(layout, per_node=8):
    ranks = run(4, _real, f"{SIZES} {layout}", per_node)
    for rank, (messages, flops, ledger) in enumerate(ranks):
        flags = f"{SIZES} {layout}"
        found_messages, found_flops, found = _rehearsed(flags, rank, per_node=per_node)
        assert found_messages == messages, rank
        assert found_flops == flops, rank
        masters = ledger["optimizer"] // 2 if "bf16 --zero 0" in layout else 0  # not in the ledger
        state = ledger["parameters"] + ledger["optimizer"] + masters
        assert abs(found["parameters"] + found["optimizer"] - state) < 100, rank


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bytes_batches_flops_and_state_are_those_of_real_ranks(layout):
    _assert_alike(layout)


@pytest.mark.soak
@pytest.mark.parametrize("layout", OTHERS)
def test_so_they_are_in_other_layouts(layout):
    _assert_alike(layout)


@pytest.mark.parametrize("zero", [0, 1])
@pytest.mark.parametrize("per_node", [1, 2])
def test_so_they_are_between_nodes_and_gradients_take_no_more_memory(per_node, zero):
    """Whatever carries their sums: scratch is none of them."""
    layout = f"--dp 4 --zero {zero}"
    _assert_alike(layout, per_node)
    within, between = (
        _rehearsed(f"{SIZES} {layout}", 1, per_node=n)[2]["gradients"] for n in (4, per_node)
    )
    assert between == within


# ---- memory --------------------------------------------------------------------------------------


def _kept(flags):
    """Bytes that autograd keeps of a microbatch, on real tensors."""
    args = hybrid.parse_args(flags.split(), dist.get_world_size())
    trainer = hybrid.Trainer(args, hybrid.mesh_of(args), torch.device("cpu"))
    (chunk,) = trainer.chunks
    if chunk.first or chunk.last:
        return None
    rows = args.batch_size // args.microbatches
    x = torch.zeros(args.seq_len, rows, args.hidden, requires_grad=True)
    with saved_bytes(chunk.parameters()) as kept:
        trainer.stages[0](x.view_as(x))
    return kept()


def test_a_stage_holds_one_microbatch_more_than_the_next_and_each_is_what_autograd_keeps():
    flags = f"{SIZES} --layers 4 --pp 4 --microbatches 4"
    (kept,) = set(run(4, _kept, flags)) - {None}
    first, second = (_rehearsed(flags, rank)[2]["activations"] for rank in (1, 2))
    assert first - second == kept


def test_an_activation_too_many_and_a_message_too_many_are_seen():
    flags, forward = f"{SIZES} --dp 4 --microbatches 2", hybrid.MLP.forward
    messages, _, memory = _rehearsed(flags, 0)

    def hoard(self, x):
        self.hoarded = x.detach().clone()
        return forward(self, x)

    with patch.object(hybrid.MLP, "forward", hoard):
        found = _rehearsed(flags, 0)
    assert found[2]["activations"] - memory["activations"] == 2 * (32 * 2 * 32 * 4)  # of 2 layers
    assert found[0] == messages

    def chatter(self):
        hybrid.all_reduce(torch.zeros(128), group=self.mesh.dp_group)

    with patch.object(hybrid.Trainer, "sum_shared_gradients", chatter):
        found = _rehearsed(flags, 0)
    extra = [a - b for a, b in zip(found[0]["dp_group"], messages["dp_group"])]
    assert extra == [2 * 128 * 4 * 3 // 4, 2]  # bytes, and batches: there and back


# ---- sizes of the literature ---------------------------------------------------------------------

LLAMA = (
    "--layers 126 --hidden 16384 --heads 128 --kv-heads 8 --ffn 79872 --vocab-size 128256 --tp 8 "
    "--seq-len 8192 --dtype bf16 --sp --pp 16 --batch-size 2048 --microbatches 16 --gpus 16384"
)
DEEPSEEK = (
    "--layers 61 --hidden 7168 --heads 128 --ffn 3072 --experts 256 --top-k 8 --shared-experts 1 "
    "--ep 64 --ep-nodes 8 --topk-nodes 4 --balance bias --vocab-size 129280 --seq-len 4096 --pp 16 "
    "--dtype bf16 --batch-size 15360 --microbatches 60 --gpus 2048"
)
LARGE = [(LLAMA, rank) for rank in (0, 4711, 16383)]
LARGE += [(DEEPSEEK, rank) for rank in (0, 1000, 2047)]


def _table(flags, capsys):
    """{what: (counted, difference from what is planned, or None, that)} as printed."""
    assert hybrid.main(f"--rehearse {flags}".split()) == 0
    title, _, *lines = capsys.readouterr().out.splitlines()
    percent, table, lane = lambda text: float(text.rstrip("%")) / 100, {}, ""
    for line in lines:
        what, words = line[:20].strip(), line[20:].replace(",", "").split()
        lane = what.removesuffix(", MB sent") if what.endswith("sent") else lane
        name = f"{lane}, {what}" if line.startswith(" ") else what
        planned, difference = (float(words[1]), percent(words[2])) if words[2:] else (0.0, None)
        table[name] = float(words[0]), difference, planned
    return title, table


def _assert_agree(table, what=None):
    for name in what or table:
        difference = table[name][1]
        assert difference is None or abs(difference) < 0.02, table


def test_a_rank_of_16384_is_rehearsed_and_its_formulas_agree(capsys):
    flags = "--gpus 16384 --rank 4711 --pp 16 --tp 8 --sp --layers 16 --seq-len 128 --hidden 2048"
    title, table = _table(f"{flags} --microbatches 16 --batch-size 2048 --heads 8", capsys)
    assert title == "rank 4711 of 16384, pp 4, dp 76, cp 0, tp 7: layers 4 to 4"
    assert table["dp, MB sent"][0] and table["tp, MB sent"][0] and table["pp, MB sent"][0]
    _assert_agree(table)


@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.soak), 400, 1023])
def test_activations_of_the_first_a_middle_and_the_last_stage_are_the_planners(capsys, rank):
    flags = "--gpus 1024 --pp 4 --tp 8 --sp --layers 12 --hidden 4096 --heads 32 --kv-heads 8"
    flags += " --dtype bf16 --seq-len 8192 --vocab-size 128256 --batch-size 512 --microbatches 8"
    _, table = _table(f"{flags} --rank {rank}", capsys)
    assert table["activations, MB"][1] is not None
    _assert_agree(table)


MEMORY = "activations, MB", "all at once, MB"
MIDDLE = "--hidden 4096 --heads 32 --kv-heads 8 --seq-len 8192 --vocab-size 128256 --layers 8 --pp 4"
SMALL = f"{MIDDLE} --gpus 32 --batch-size 64 --microbatches 8"
EXPERTS = f"{SMALL} --ep 4 --ffn 2048 --experts 64 --top-k 8 --dtype bf16"
LONG = f"{SMALL} --tp 2 --cp 4 --seq-len 32768 --dtype bf16"
MEMORIES = [
    (f"{SMALL} --tp 4 --dtype bf16", 20),
    (f"{SMALL} --tp 4 --sp", 31),
    (f"{SMALL} --tp 4 --sp --dtype bf16 --recompute full", 12),
    (f"{SMALL} --tp 4 --sp --dtype bf16 --recompute selective", 0),
    (f"{SMALL} --tp 2 --sp --dtype bf16 --zero 2", 16),
    (f"{SMALL} --tp 2 --sp --dtype bf16 --zero 3", 0),
    (f"{SMALL} --tp 2 --dtype bf16 --schedule gpipe", 31),
    (f"{SMALL} --tp 2 --sp --dtype bf16 --schedule zb-h1 --layers 16 --microbatches 16", 12),
    (f"{SMALL} --tp 2 --sp --dtype bf16 --schedule dualpipe --layers 16 --microbatches 16", 0),
    (f"{SMALL} --tp 2 --dtype bf16 --schedule interleaved --chunks 2", 31),
    (EXPERTS, 8),
    (f"{EXPERTS} --shared-experts 1 --recompute full", 16),
    (f"{EXPERTS} --moe-every 2 --tp 4 --sp", 31),
    (f"{EXPERTS} --ep-nodes 2 --topk-nodes 1 --shared-experts 1 --tp 2", 16),
    (LONG, 8),
    (f"{LONG} --cp-method allgather", 8),
    (f"{LONG} --cp-method ulysses --recompute full", 16),
]


OF_SOAK = [case for number, case in enumerate(MEMORIES) if number % 4]
OF_SOAK = [pytest.param(*case, marks=pytest.mark.soak) for case in OF_SOAK]


@pytest.mark.parametrize("flags, rank", MEMORIES[::4] + OF_SOAK)
def test_activations_are_the_formulas_within_2_percent(capsys, flags, rank):
    _, table = _table(f"{flags} --rank {rank}", capsys)
    _assert_agree(table, MEMORY)


OF_ALL_AXES = [  # GPUs, rank, layout
    (8, 0, "--dp 4 --tp 2 --zero 0"),
    (8, 7, "--dp 4 --tp 2 --sp --zero 1 --kv-heads 1"),
    (8, 0, "--dp 4 --cp 2 --zero 3 --microbatches 2 --replicate 2"),
    (8, 7, "--ep 4 --ep-nodes 2 --experts 8 --balance none"),
    (8, 0, "--ep 4 --experts 8 --shared-experts 1 --recompute full --moe-every 2"),
    (16, 0, "--tp 4 --ep 4 --experts 8 --balance bias --zero 2 --microbatches 2"),
    (16, 15, "--ep 2 --experts 8 --microbatches 2"),
    (16, 0, "--tp 2 --sp --ep 4 --experts 8 --balance bias"),
    (4, 3, "--tp 4 --ep 1 --experts 4 --balance bias"),
    (8, 7, "--cp 4 --cp-method allgather --recompute selective"),
    (8, 0, "--cp 4 --cp-method ulysses --recompute selective --kv-heads 4"),
    (4, 1, "--pp 4 --schedule 1f1b --microbatches 8"),
    (6, 5, "--pp 6 --layers 6 --schedule 1f1b --microbatches 6 --batch-size 48"),
    (4, 0, "--pp 4 --schedule dualpipe --microbatches 8"),
    (4, 1, "--pp 2 --schedule zb-v --microbatches 8 --zero 2"),
    (16, 15, "--tp 4 --pp 2 --microbatches 4 --recompute full"),
    (16, 0, "--tp 4 --pp 2 --sp --microbatches 4 --schedule interleaved"),
    (64, 0, "--dp 64"),  # over eight nodes
    (192, 0, "--hidden 2048 --layers 2 --batch-size 192"),  # over more than a batch has peers for
    (1024, 0, "--tp 4 --sp --zero 3 --batch-size 256"),
    (1024, 0, "--cp 4 --zero 2 --batch-size 512"),
    (8, 0, "--tp 8 --sp --hidden 4096 --seq-len 16384 --layers 2 --batch-size 4"),  # in slices
    (8, 0, "--tp 2 --sp --hidden 4096 --layers 2 --dtype bf16"),
]


@pytest.mark.parametrize("gpus, rank, layout", OF_ALL_AXES)
def test_batches_are_those_of_the_formula_to_the_last(capsys, gpus, rank, layout):
    sizes = "--hidden 256 --heads 8 --seq-len 512 --vocab-size 256 --layers 4 --batch-size 64"
    _, table = _table(f"{sizes} --gpus {gpus} --rank {rank} {layout}", capsys)
    batches = {name: row for name, row in table.items() if name.endswith("batches")}
    if "--zero 0" in layout:  # as many as buckets
        assert batches.pop("dp, batches")[1] is None
    assert batches and all(difference == 0 for _, difference, _ in batches.values()), table


@pytest.mark.soak
@pytest.mark.parametrize("flags, rank", LARGE)
def test_large_models_take_a_minute_at_most_and_their_formulas_agree(capsys, flags, rank):
    began = time.process_time()
    _, table = _table(f"{flags} --rank {rank}", capsys)
    assert time.process_time() - began < 60
    _assert_agree(table)


@pytest.mark.parametrize(
    "flags",
    [
        "--gpus 16 --tp 4 --experts 8",  # each expert on all of tp, whose gradients are summed
        "--gpus 16 --tp 4 --ep 2 --experts 8 --shared-experts 1 --sp --zero 0",
        "--gpus 16 --tp 8 --kv-heads 1 --sp",  # all of tp have the keys
        "--gpus 16 --ep 16 --ep-nodes 2 --experts 16",  # ep shares groups with the replicas
        "--gpus 6 --pp 6 --microbatches 8",  # the head, and the embedding, are alone in their stages
    ],
)
def test_what_a_few_ranks_share_is_counted_as_it_is_planned(flags, capsys):
    sizes = "--layers 4 --hidden 2048 --heads 16 --seq-len 1024 --vocab-size 512 --batch-size 48"
    last = int(flags.split()[1]) - 1  # has the scalars of a sum
    _, table = _table(f"{sizes} --dtype bf16 {flags} --rank {last}", capsys)
    batches = [table.pop(name) for name in list(table) if name.endswith("batches")]
    if "--zero 0" not in flags:
        counted, _, planned = map(sum, zip(*((a, 0, c) for a, _, c in batches)))
        assert counted == pytest.approx(planned, rel=0.02)
    for what in table.keys() - {*MEMORY}:
        assert table[what][1] is None or abs(table[what][1]) < 0.02, table


def test_to_sum_experts_over_tp_takes_their_gradients_once_more(capsys):
    flags = "--layers 4 --hidden 1024 --heads 8 --seq-len 512 --vocab-size 512 --dtype bf16"
    _, table = _table(f"{flags} --gpus 16 --tp 4 --ep 2 --experts 8 --zero 0", capsys)
    assert table["tp, MB sent"][0] > 400
    _assert_agree(table, MEMORY)


@pytest.mark.parametrize("flags", ["--gpus 2 --pp 1", "--gpus 8 --tp 2 --ep 2 --experts 8"])
def test_gradients_are_whole_and_a_row_is_summed_beside_them(capsys, flags):
    sizes = "--layers 4 --hidden 1024 --heads 8 --seq-len 512 --vocab-size 512 --batch-size 16"
    _, table = _table(f"{sizes} --microbatches 2 --zero 1 {flags}", capsys)
    _assert_agree(table, ["gradients, MB"])


def test_a_model_of_the_literature_has_its_sizes_but_for_those_that_are_given(capsys):
    flags = "--model deepseek-v3 --layers 9 --gpus 64 --rank 20 --ep 8 --pp 4 --batch-size 64"
    title, table = _table(f"{flags} --hidden 1024 --heads 8 --balance bias", capsys)
    first, _, last = title.split()[-3:]
    layer = 4 * 1024**2 + 8 * 1024 + 256 * 1024 + 2 * 1024 * 3072 * (256 // 8 + 1)
    layers = int(last) - int(first) + 1
    assert table["parameters, MB"][0] == pytest.approx(layers * 4e-6 * layer)


# ---- errors --------------------------------------------------------------------------------------

ERRORS = [
    ("--rehearse --rank 8 --gpus 8", 1, "--rank 8 is not one of --gpus 8"),
    ("--rehearse --rank -1 --gpus 8", 1, "--rank -1 must not be negative"),
    ("--model llama3-8b", 1, "--model llama3-8b needs --plan or --rehearse"),
    ("--rehearse", 2, "--rehearse runs in one process, not in those of torchrun"),
    ("--rank 3", 1, "--rank 3 needs --rehearse"),
    ("--gpus 8", 1, "--gpus 8 needs --plan or --rehearse"),
    ("--rehearse --gpus 8 --tp 3", 1, "--pp 1 x --dp 2 x --cp 1 x --tp 3 is not the number of"),
    ("--rehearse --gpus 8 --backend nccl", 1, "--backend nccl needs training, not --rehearse"),
    ("--rehearse --gpus 8 --verify", 1, "--verify needs training, not --rehearse"),
]


@pytest.mark.parametrize("flags, processes, message", ERRORS)
def test_what_cannot_be_rehearsed_is_told_in_a_line(flags, processes, message):
    with pytest.raises(ValueError) as error:
        hybrid.parse_args(flags.split(), processes)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)
