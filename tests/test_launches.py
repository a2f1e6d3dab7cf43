"""What a step asks of a GPU and of NCCL, counted on fake tensors: see fake_cuda.py.

A batch of messages costs the host about 60 us, whatever it carries; an NCCL that gets pointers off
16 bytes copies by single ones; and a host that waits for the device launches nothing meanwhile.
"""

import pytest

import fake_cuda

SMALL = "--layers 4 --hidden 1024 --heads 8 --seq-len 1024 --batch-size 8"
XL = "--layers 24 --hidden 2048 --heads 16 --seq-len 1024 --batch-size 8"
LONG = "--layers 24 --hidden 2048 --heads 16 --seq-len 16384 --batch-size 1"
SEVEN = "--layers 32 --hidden 4096 --heads 32 --seq-len 4096 --batch-size 1"
EXPERTS = "--layers 4 --hidden 1024 --heads 8 --seq-len 1024 --batch-size 8 --experts 8 --top-k 2"

MOST_BATCHES = [  # of a step on one rank: ranks, layout, at most; 60 us each are less than it computes
    (8, f"{SMALL} --tp 8 --sp", 120),
    (8, f"{SMALL} --dp 8 --zero 0", 120),
    (8, f"{SMALL} --dp 8 --zero 1", 160),
    (8, f"{SMALL} --cp 8 --cp-method allgather --zero 0", 120),
    (8, f"{SEVEN} --tp 8 --sp", 400),
    (8, f"{SEVEN} --tp 8", 400),
    (8, f"{XL} --dp 8 --zero 0", 500),
    (8, f"{XL} --dp 8 --zero 1", 550),
    (2, f"{XL} --dp 2 --zero 0", 500),
    (8, f"{LONG} --cp 8 --cp-method allgather --zero 0", 600),
    (8, f"{LONG} --cp 8 --cp-method ring --zero 0", 1100),
]
OTHERS = [  # ranks, layout: one of every kind, of which no sizes are claimed
    (1, f"{SMALL} --dp 1"),
    (1, f"{SMALL} --dp 1 --recompute full --dropout 0.1"),
    (1, f"{EXPERTS} --dp 1"),
    (8, f"{SMALL} --dp 2 --tp 2 --pp 2 --schedule 1f1b --microbatches 4 --zero 0"),
    (8, f"{SMALL} --dp 2 --tp 2 --sp --pp 2 --schedule zb-h1 --microbatches 4 --zero 1"),
    (4, f"{SMALL} --pp 4 --schedule interleaved --microbatches 4 --recompute selective"),
    (4, f"{SMALL} --pp 4 --schedule dualpipe --microbatches 8"),
    (8, f"{SMALL} --cp 2 --cp-method ulysses --tp 2 --dp 2 --zero 1"),
    (8, f"{SMALL} --cp 4 --tp 2 --sp --kv-heads 2 --recompute full"),
    (8, f"{EXPERTS} --dp 8 --ep 8 --zero 1"),
    (8, f"{EXPERTS} --dp 4 --tp 2 --ep 4 --zero 0 --microbatches 2"),
    (8, f"{EXPERTS} --dp 4 --tp 2 --sp --ep 4 --balance bias --recompute full"),
    (8, f"{EXPERTS} --dp 4 --pp 2 --ep 2 --microbatches 2 --capacity-factor 1.0"),
]
COMMON = "--dtype bf16 --vocab-size 50304"


def _flags(layout):
    return f"{COMMON} {layout}" + (" --microbatches 1" if "--microbatches" not in layout else "")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The pretended device. Where a compiler is, nothing in this file is skipped."""
    if fake_cuda.compiler() is None:
        pytest.skip("there is no C++ compiler: c++, g++ or clang++")
    return fake_cuda.build(tmp_path_factory.mktemp("fake_cuda"))


@pytest.fixture(scope="session")
def counts(library):
    """counts(world_size, layout): those of the last rank of all layouts of a list, counted at once."""
    found = {}

    def of(world_size, layout):
        if (world_size, layout) not in found:
            rows = [row[:2] for row in MOST_BATCHES + OTHERS]
            jobs = [(size, size - 1, _flags(layout)) for size, layout in rows]
            found.update(zip(rows, fake_cuda.count(library, jobs)))
        counted = found[world_size, layout]
        assert not counted.error, counted.error
        return counted

    return of


def test_the_pretended_device_builds_wherever_there_is_a_compiler(tmp_path):
    if fake_cuda.compiler() is None:
        pytest.skip("there is no C++ compiler: c++, g++ or clang++")
    assert fake_cuda.build(tmp_path).is_file()


@pytest.mark.parametrize("world_size, layout, most", MOST_BATCHES)
def test_a_step_launches_few_batches(counts, world_size, layout, most):
    assert counts(world_size, layout).batches <= most


ROWS = [row[:2] for row in MOST_BATCHES + OTHERS]


@pytest.mark.parametrize("world_size, layout", ROWS)
def test_the_host_waits_once_a_step_and_once_where_experts_hear_of_their_rows(
    counts, world_size, layout
):
    found = counts(world_size, layout).synchronisations
    of_experts = sum(n for place, n in found.items() if "expert_parallel.py" in place)
    elsewhere = {place: n for place, n in found.items() if "expert_parallel.py" not in place}
    runs = 1 + ("--recompute full" in layout)
    microbatches = int(layout.split("--microbatches ")[1][0]) if "--microbatches" in layout else 1
    layers = 4 // (2 if "--pp 2" in layout else 1)
    assert of_experts == ("--experts" in layout) * layers * runs * microbatches, found
    assert sum(elsewhere.values()) == 1 and "hybrid.py Trainer" in next(iter(elsewhere)), found


@pytest.mark.parametrize("world_size, layout", ROWS)
def test_nothing_but_tokens_goes_to_the_device(counts, world_size, layout):
    copies = counts(world_size, layout).copies
    assert sum(n for place, n in copies.items() if place.startswith("to")) <= 2, copies


@pytest.mark.parametrize("world_size, layout", ROWS)
def test_what_is_sent_is_on_the_device_and_begins_on_128_bytes(counts, world_size, layout):
    """NCCL takes nothing from the host, and 16 bytes at a time only between pointers on 16."""
    found = counts(world_size, layout)
    assert not found.refused
    assert not +found.misaligned["16"]
    assert not +found.misaligned["128"]


@pytest.mark.parametrize("world_size, layout", ROWS)
def test_a_group_of_one_rank_launches_nothing(counts, world_size, layout):
    assert world_size > 1 or counts(world_size, layout).batches == 0
