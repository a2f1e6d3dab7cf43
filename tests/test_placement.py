"""placement.py prints where each parameter of a rank lives; each weight counts once over all ranks."""

import math
from itertools import combinations_with_replacement
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import placement
import rehearse
import tensor_parallel
from hybrid import boxes_between, views_in_whole
from ranks import soak
from reference_gpt import reference_gpt
from tensor_parallel import Shard

STAGES = """
wte.weight                256 x 128  dim 0 over {0 1}  {0 2}  dp x cp {0 2}; tied {0 4}
wpe.weight                64 x 128   no                {0 2}  dp x cp {0 2}; tp {0 1}
h.0,1.ln_1.weight         128        no                {0 2}  dp x cp {0 2}; tp {0 1}
h.0,1.attn.c_attn.weight  384 x 128  dim 0 over {0 1}  {0 2}  dp x cp {0 2}
h.0,1.mlp.c_proj.weight   128 x 512  dim 1 over {0 1}  {0 2}  dp x cp {0 2}
h.0,1.mlp.c_proj.bias     128        no                {0 2}  dp x cp {0 2}; tp {0 1}
"""
EXPERTS = """
h.0,1,2,3.ln_1.weight         128            no                    no  dp x cp {1 3 5 7}
h.0,1,2,3.mlp.router.weight   4 x 128        no                    no  dp x cp {1 3 5 7}; tp {0 1}
h.0,1,2,3.mlp.experts.w_in    4 x 512 x 128  dim 0 over {0 1 2 3}  no  dp x cp {1 5}
wte.weight                    256 x 128      dim 0 over {0 1}      no  dp x cp {1 3 5 7}
"""
REPLICAS = """
h.2,3.ln_1.weight  128        no  no  replicas {0 1}         1.0      yes
wte.weight         256 x 128  no  no  replicas {0 1}; tied {0 1}  std 0.02  a copy
h.0,1.ln_1.weight  128        no  no  replicas {0 1}         1.0      a copy
"""
PRINTED = {
    "--gpus 8 --tp 2 --pp 2 --sp": STAGES,
    "--gpus 8 --rank 1 --tp 2 --experts 4 --ep 4 --zero 0": EXPERTS,
    "--gpus 2 --rank 1 --pp 2 --schedule dualpipe --microbatches 4 --zero 0": REPLICAS,
}


@pytest.mark.parametrize("flags", PRINTED)
def test_a_line_says_what_is_split_cut_and_summed_over_which_ranks(capsys, flags):
    assert placement.main(flags.split()) == 0
    words = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    for line in PRINTED[flags].strip().splitlines():
        expected = " ".join(line.split())
        assert any(f"{found} ".startswith(f"{expected} ") for found in words), (expected, words)


LAYOUTS = [
    soak("--gpus 8 --tp 2 --pp 2 --sp --zero 0"),
    "--gpus 8 --tp 2 --pp 2 --experts 4 --ep 4 --zero 0 --block llama",
    "--gpus 4 --pp 4 --schedule dualpipe --microbatches 8 --zero 0 --layers 2",
    soak("--gpus 4 --pp 2 --cp 2 --schedule interleaved --microbatches 4 --zero 0 --head untied"),
]


@pytest.mark.parametrize("flags", LAYOUTS)
def test_over_all_ranks_each_weight_counts_once(flags):
    """Of the ranks that hold the same part, here those of dp x cp, only the first is asked."""
    counted = 0
    for rank in range(int(flags.split()[1])):
        args, _ = rehearse.parse([*flags.split(), "--rank", str(rank)])
        with rehearse.trainer_of(args, rank) as (trainer, _):
            for row in trainer.placements:
                if not row.is_buffer and row.counts and dist.get_rank(row.home.dp_cp_group) == 0:
                    counted += row.tensor.numel()
        dist.destroy_process_group()
    with torch.device("meta"):
        assert counted == sum(math.prod(p.shape) for p in reference_gpt(args).parameters())


def test_an_invalid_flag_is_one_line(capsys):
    assert placement.main("--gpus 8 --tp 3".split()) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("placement.py: error: --pp 1 ") and err.count("\n") == 1


@pytest.mark.parametrize("rank", range(3))
@pytest.mark.parametrize(
    "shape, dim, blocks",
    [((7, 3), 0, (4, 3)), ((9,), 0, (3, 6)), ((2, 7, 5), 1, (4, 3)), ((5, 2, 3), 0, (5,)),
     ((4, 6), 1, (2, 2, 2))],
)  # fmt: skip
def test_a_box_has_the_elements_of_the_whole_at_its_index(shape, dim, blocks, rank):
    """For every range that a piece of this rank's part could be."""
    whole = torch.arange(math.prod(shape)).view(shape)
    shard = Shard(dim, blocks)
    with patch.object(tensor_parallel, "rank_and_size", lambda group: (rank, 3)):
        part = shard.cut(whole)
        for begin, end in combinations_with_replacement(range(part.numel() + 1), 2):
            piece = part.flatten()[begin:end]
            piece.whole_shape, piece.offset = part.shape, begin
            found, views = views_in_whole(piece, piece, shard)
            assert found == shape and sum(view.numel() for view in views.values()) == end - begin
            for index, view in views.items():
                box = whole[tuple(slice(i, i + n) for i, n in zip(index, view.shape))]
                assert torch.equal(box, view)
            filled = torch.cat([view.flatten() for view in views.values()] or [piece])
            assert filled.unique().equal(piece.sort().values)


def test_a_range_of_a_flattened_matrix_is_cut_into_at_most_three_boxes():
    expected = [((0, 1), (1, 1)), ((1, 0), (2, 2)), ((3, 0), (1, 1))]
    assert list(boxes_between((4, 2), 1, 7)) == expected


def test_a_single_number_is_saved_by_the_rank_that_has_it():
    number = torch.nn.Parameter(torch.tensor(2.0))
    assert views_in_whole(number, number) == ((), {(): number})
    piece = torch.nn.Parameter(torch.empty(0))  # of a rank whose shard lacks it
    piece.whole_shape, piece.offset = (), 1
    assert views_in_whole(piece, piece) == ((), {})
