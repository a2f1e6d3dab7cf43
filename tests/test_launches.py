"""A step's launches on a GPU and on NCCL, counted on the pretended device of fake_cuda.py.

A batch of messages costs the host about 60 us, whatever its size. NCCL copies a tensor that is not
aligned to 16 bytes byte by byte. While the host waits for the device, it launches nothing.
"""

import pytest

import fake_cuda
from layouts import soak_but

COUNTS = "expert_parallel.py DispatchPlan.__init__"  # messages of a few integers of 8 bytes
SMALL = "--hidden 1024 --heads 8 --seq-len 1024 --batch-size 8"
COMMON = "--dtype bf16 --vocab-size 50304"

BATCHES = [  # (layout of 8 ranks and 4 layers, batches of a step on one rank, their messages)
    ("--tp 8 --sp", 51, 714),
    ("--tp 8", 40, 560),
    ("--dp 8 --zero 0 --dtype fp32", 34, 476),
    ("--dp 8 --zero 1", 19, 266),
    ("--dp 8 --zero 2", 19, 266),
    ("--dp 8 --zero 3", 26, 364),
    ("--cp 8 --cp-method allgather --zero 1 --replicate 8", 28, 392),
    ("--cp 8 --cp-method ring --zero 1 --replicate 8", 104, 448),
    ("--cp 8 --cp-method ulysses --zero 1 --replicate 8", 36, 504),
]
EXPERTS = f"{SMALL} --experts 8 --top-k 2"
PAIRS = f"{EXPERTS} --schedule dualpipe-v --overlap"
OTHERS = [  # (ranks, layers, layout, microbatches), one layout of every kind
    (1, 2, f"{SMALL} --dp 1", 1),
    (1, 2, f"{SMALL} --dp 1 --recompute full --dropout 0.1", 1),
    (1, 2, f"{EXPERTS} --dp 1", 1),
    (8, 2, f"{SMALL} --dp 2 --tp 2 --pp 2 --schedule 1f1b --zero 1 --replicate 2", 4),
    (8, 2, f"{SMALL} --dp 2 --tp 2 --sp --pp 2 --schedule zb-h1 --zero 1", 4),
    (2, 4, f"{SMALL} --pp 2 --schedule interleaved --recompute selective", 4),
    (2, 2, f"{SMALL} --pp 2 --schedule dualpipe", 4),
    (8, 2, f"{SMALL} --cp 2 --cp-method ulysses --tp 2 --dp 2 --zero 1", 1),
    (8, 2, f"{SMALL} --cp 4 --tp 2 --sp --kv-heads 2 --recompute full", 2),
    (4, 2, f"{SMALL} --cp 4 --kv-heads 2 --recompute selective --dtype fp32", 1),
    (2, 2, f"{EXPERTS} --dp 2 --ep 2 --dtype fp32", 1),
    (8, 2, f"{EXPERTS} --dp 8 --ep 8 --zero 1", 1),
    (8, 2, f"{EXPERTS} --dp 8 --ep 8 --topk-nodes 1", 1),
    (8, 2, f"{EXPERTS} --dp 4 --tp 2 --ep 4 --zero 1 --replicate 4", 2),
    (8, 2, f"{EXPERTS} --dp 4 --tp 2 --sp --ep 4 --balance bias --recompute full", 1),
    (8, 2, f"{EXPERTS} --dp 4 --pp 2 --ep 2 --capacity-factor 1.0 --vocab-size 512", 2),
    (8, 4, f"{PAIRS} --vocab-size 512 --batch-size 16 --dp 4 --pp 2 --ep 4", 4),
]
ROWS = [(8, 4, f"{SMALL} {layout}", 1) for layout, *_ in BATCHES] + OTHERS
PEERS = [  # (layout, the number of peers of a rank, added up over all groups)
    ("--dp 8", 7),
    ("--tp 8", 7),
    ("--tp 2 --pp 2 --dp 2", 3),
    ("--dp 8 --ep 8 --experts 8 --top-k 2", 14),
]
CONNECTED = [((8, 2, f"{SMALL} {layout}", 1), peers) for layout, peers in PEERS]
PLAIN = [*ROWS[::24], CONNECTED[2][0]]  # the others are soak tests
OF_ROWS = soak_but(lambda _, row: row in PLAIN, ROWS)


def _job(world_size, layers, layout, microbatches):
    """Return the last rank's job. In a pipeline, this rank computes the loss."""
    flags = f"{COMMON} --layers {layers} {layout} --microbatches {microbatches}"
    return world_size, world_size - 1, flags


@pytest.fixture(scope="session")
def counts(library):
    """Provide counts(*row), the Counts of a step. PLAIN rows are counted first."""
    plain = [_job(*row) for row in PLAIN]
    rows = [row for row in ROWS + [row for row, _ in CONNECTED] if row not in PLAIN]
    others = [_job(*row) for row in rows]
    found = {}

    def of(*row):
        job = _job(*row)
        if job not in found:
            jobs = plain if job in plain else others
            processes = 1 + len(jobs) // 8  # a start takes as long as 7 jobs
            found.update(zip(jobs, fake_cuda.count(library, jobs, processes)))
        counted = found[job]
        assert not counted.error, counted.error
        return counted

    return of


@pytest.mark.parametrize("layout, batches, messages", soak_but(lambda i, _: i == 0, BATCHES))
def test_a_step_launches_these_numbers_of_batches_and_messages(counts, layout, batches, messages):
    found = counts(8, 4, f"{SMALL} {layout}", 1)
    assert (found.batches.total(), found.messages.total()) == (batches, messages)


@pytest.mark.parametrize("row, peers", soak_but(lambda i, _: i == 2, CONNECTED))
def test_a_rank_exchanges_messages_with_few_peers(counts, row, peers):
    """NCCL uses hundreds of megabytes for each peer of a group, which PyTorch does not count."""
    assert sum(map(len, counts(*row).peers.values())) == peers


@pytest.mark.parametrize("world_size, layers, layout, microbatches", OF_ROWS)
def test_the_host_waits_once_per_step_and_once_per_dispatch_to_experts(
    counts, world_size, layers, layout, microbatches
):
    found = counts(world_size, layers, layout, microbatches).synchronisations
    of_experts = {place: n for place, n in found.items() if "expert_parallel.py" in place}
    runs = 2 if "--recompute full" in layout else 1
    hops = layers // (2 if "--pp 2" in layout else 1) * runs * microbatches
    hops *= 2 if "--topk-nodes" in layout else 1
    assert sum(of_experts.values()) == hops * ("--experts" in layout), found
    elsewhere = {place: n for place, n in found.items() if place not in of_experts}
    assert list(elsewhere.values()) == [1] and "hybrid.py" in min(elsewhere), found


@pytest.mark.parametrize("world_size, layers, layout, microbatches", OF_ROWS)
def test_only_tokens_are_copied_to_the_device(counts, world_size, layers, layout, microbatches):
    found = counts(world_size, layers, layout, microbatches).copies
    arriving = {place: n for place, n in found.items() if place.startswith("to device")}
    assert sum(arriving.values()) <= 2 and all("hybrid.py" in place for place in arriving), found


@pytest.mark.parametrize("world_size, layers, layout, microbatches", OF_ROWS)
def test_messages_are_on_the_device_and_aligned_to_16_bytes_or_128_in_buckets_and_shards(
    counts, world_size, layers, layout, microbatches
):
    found = counts(world_size, layers, layout, microbatches)
    assert bool(found.batches) == (world_size > 1)  # a group of one rank launches nothing
    assert not found.refused
    assert not found.misaligned[16].keys() - {COUNTS}
    assert not [x for x in found.misaligned[128] if x.startswith(("ddp.py", "zero.py"))]
