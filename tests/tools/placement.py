"""Where does each parameter live? Prints the Placements of hybrid.py for one rank of a layout.

    python tests/tools/placement.py --gpus 8 --rank 0 --tp 2 --pp 2 --sp       flags of hybrid.py

Parameters of several layers share a line if they differ in nothing else. {0 2} are ranks.

    whole     the shape of the whole parameter
    split     the dim that is split, and the ranks that together hold the whole
    cut       the ranks over which ZeRO cuts what this rank would hold
    summed    the ranks over which its gradient is summed, in this order: over dp x cp in backward;
              over tp if a rank's gradient covers its own tokens only; over pp if DualPipe's two
              replicas have it, and if it is tied, that is shared by embedding and head
    begins    the initial value: a number, or the standard deviation of normal numbers
    counts    whether this rank counts it in the norm of the gradients, and saves it in checkpoints
"""

import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support"), str(TESTS / "tools")]

import torch.distributed as dist

import hybrid
import rehearse

COLUMNS = "parameter", "whole", "split", "cut", "summed", "begins", "counts"


def ranks_of(group):
    """Return "{0 2}" for a group of these ranks, or "" for a group of one."""
    ranks = dist.get_process_group_ranks(group)
    return "{" + " ".join(map(str, ranks)) + "}" if len(ranks) > 1 else ""


def sums_of(row, trainer):
    """Return what the gradient is summed over, in words."""
    mesh = trainer.mesh
    groups = [("dp x cp", row.home.dp_cp_group)]
    if row.sum_over_tp:
        groups.append(("tp", row.home.tp_group))
    if trainer.replicated:
        groups.append(("replicas", mesh.pp_group))
    if row.is_tied and hasattr(mesh, "embedding_group"):
        groups.append(("tied", mesh.embedding_group))
    found = [f"{what} {ranks_of(group)}" for what, group in groups if ranks_of(group)]
    return "; ".join(found) or "no"


def cells_of(row, trainer):
    """Return what the table says of a parameter besides its name."""
    whole, _ = hybrid.views_in_whole(row.tensor, row.tensor, row.part)
    split = ranks_of(row.home.split_group) if row.part else ""
    cut = ranks_of(row.home.shard_group) if trainer.args.zero else ""
    begins = row.initial
    if isinstance(row.initial, hybrid.Normal):
        begins = f"std {row.initial.std:.4g}"
    return (
        " x ".join(map(str, whole)),
        f"dim {row.part.dim} over {split}" if split else "no",
        cut or "no",
        sums_of(row, trainer),
        str(begins),
        "yes" if row.counts else "first of tp does" if row.is_original else "a copy",
    )


def table(trainer):
    """Return the rows of the table, with one row for a parameter of several layers."""
    layers = {}  # {(name with * for the layer's number, cells): numbers of layers}
    for row in trainer.placements:
        if row.is_buffer:
            continue
        name = row.name.removeprefix("transformer.")
        before, *after = name.split(".", 2)
        if before == "h":
            number, name = after[0], f"h.*.{after[1]}"
        else:
            number = ""
        layers.setdefault((name, cells_of(row, trainer)), []).append(number)
    return [
        (name.replace("*", ",".join(numbers)), *cells) for (name, cells), numbers in layers.items()
    ]


def main(argv=None):
    """Print the table; return the exit status."""
    try:
        args, rank = rehearse.parse(sys.argv[1:] if argv is None else argv, sys.modules[__name__])
    except ValueError as error:
        print(f"{Path(__file__).name}: error: {error}", file=sys.stderr)
        return 2
    with rehearse.trainer_of(args, rank) as (trainer, _):
        rows = [COLUMNS, *table(trainer)]
    widths = [max(map(len, column)) for column in zip(*rows)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip())
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
