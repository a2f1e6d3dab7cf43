"""Compare what a change of the code must not move with another commit, in ten layouts.

    python tests/tools/record.py                 the working tree beside HEAD
    python tests/tools/record.py 6d58fdf         the working tree beside that commit

bits      of the losses, the gradient norms and the final weights of 20 steps; if they differ,
          the first step that does, and the largest relative difference of the 20
bytes     that each rank sends in a step
batches   of messages that each rank would launch on NCCL in a step, and waits of the host
memory    what `tests/tools/rehearse.py` prints for the layout

A tree is recorded by its own modules and its own instruments. The status is 1 if anything differs.
"""

import argparse
import contextlib
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

STEPS = 20
MODEL = "--layers 4 --hidden 64 --heads 4 --seq-len 32 --vocab-size 96 --batch-size 16 --warmup 5"
LAYOUTS = """processes | flags
1 | --dp 1
4 | --dp 4 --zero 0
4 | --dp 4 --zero 1
4 | --dp 4 --zero 3 --dtype bf16
4 | --dp 4 --zero 2 --replicate 2 --microbatches 2
4 | --dp 2 --tp 2 --sp --dropout 0.1
4 | --tp 2 --pp 2 --schedule zb-h1 --microbatches 4
4 | --dp 2 --cp 2 --recompute full
4 | --dp 4 --experts 4 --ep 2 --shared-experts 1 --balance bias
4 | --dp 2 --pp 2 --schedule dualpipe --microbatches 4
"""
HERE = Path(__file__).resolve().parent
PROJECT = HERE.parents[1]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("commit", nargs="?", default="HEAD", help="default: HEAD")
    parser.add_argument("--tree", type=Path, help=argparse.SUPPRESS)  # record this folder, print
    args = parser.parse_args()
    if args.tree:
        print(json.dumps(record(args.tree)))
        return
    with checked_out(args.commit) as folder:
        then = recorded(folder)
    now = recorded(PROJECT)
    same = [compare(row, then[row], now[row]) for row in now]
    sys.exit(not all(same))


@contextlib.contextmanager
def checked_out(commit):
    """Provide a folder with the files of a commit."""
    with tempfile.TemporaryDirectory() as folder:
        archive = subprocess.run(
            ["git", "archive", commit], cwd=PROJECT, check=True, stdout=subprocess.PIPE
        )
        subprocess.run(["tar", "-x", "-C", folder], input=archive.stdout, check=True)
        yield Path(folder)


def recorded(tree):
    """Return the record of a tree, which another process makes."""
    command = [sys.executable, str(HERE / "record.py"), "--tree", str(tree)]
    # a forkserver looks for modules in the current directory first
    found = subprocess.run(command, cwd=tree, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(found.stdout.splitlines()[-1])


# ---- one tree ------------------------------------------------------------------------------------


def record(tree):
    """Return {layout: what its ranks record}, with the modules and instruments of `tree`."""
    folders = [tree, *(path for path in (tree / "tests").glob("**/") if path.name[0] not in "._")]
    sys.path[:0] = map(str, folders)
    sys.path.append(str(HERE))
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    import ranks
    from record import train

    found = {}
    for line in LAYOUTS.splitlines()[1:]:
        world_size, flags = line.split(" | ")
        by_rank = ranks.run(int(world_size), train, f"{MODEL} {flags}", timeout=300)
        found[line] = {name: [own[name] for own in by_rank] for name in by_rank[0]}
        found[line]["memory"] = memory(tree, int(world_size), flags)
    ranks.pool.close()
    return found


def train(flags):
    """Train in a layout; return what this rank records."""
    import gpu_counts
    import hybrid
    import torch
    import torch.distributed as dist
    from collectives import count_bytes

    args = hybrid.parse(flags.split(), dist.get_world_size())
    trainer = hybrid.Trainer(args, hybrid.make_mesh(args), torch.device("cpu"))

    def step(number):
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(args.vocab_size, (args.batch_size, 1 + args.seq_len),
                               generator=generator)[trainer.own_rows()]
        return trainer.step(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    metrics = [step(number) for number in range(STEPS)]
    weights = [p for chunk in trainer.chunks for p in chunk.parameters()]
    found = {"losses": [line["loss"] for line in metrics]}
    found["norms"] = [line["grad_norm"] for line in metrics]
    found["weights"] = sorted(map(digest, weights))
    with count_bytes() as sent:
        step(STEPS)
    found["bytes"] = sent.bytes()
    with gpu_counts.batches() as posted, gpu_counts.waits() as waited:
        step(STEPS)
    found["batches"] = dict(sorted(posted.items()))
    found["waits"] = dict(sorted(waited.items()))
    return found


def digest(tensor):
    """Return a name of a tensor's bits."""
    import torch

    bits = tensor.detach().reshape(-1).view(torch.uint8)
    return hashlib.sha256(bits.numpy().tobytes()).hexdigest()[:16]


def memory(tree, world_size, flags):
    """Return what the rehearsal of rank 0 prints, or its error."""
    tool = next((tree / "tests").glob("**/rehearse.py"))
    command = [sys.executable, str(tool), "--gpus", str(world_size), *MODEL.split(), *flags.split()]
    found = subprocess.run(command, cwd=tree, capture_output=True, text=True)
    # on a busy machine it also tells its progress, on stderr
    return found.stdout if found.returncode == 0 else found.stderr


# ---- two trees -----------------------------------------------------------------------------------


def compare(layout, then, now):
    """Print a line for the layout, and lines for what differs; return whether nothing does."""
    differing = [name for name in now if now[name] != then[name]]
    print(f"{layout}: " + (f"{', '.join(differing)} differ" if differing else "the same"))
    for name in differing:
        if name in ("losses", "norms"):
            print("    " + first_difference(name, then[name][0], now[name][0]))
        elif name != "weights":
            print(f"    {name} then: {then[name]}\n    {name} now:  {now[name]}")
    return not differing


def first_difference(name, then, now):
    """Say from which step on numbers differ, and by how much."""
    off = [abs(new - old) / abs(old) for old, new in zip(then, now, strict=True)]
    if not any(off):
        return f"{name}: rank 0's are the same"
    first = next(step for step, error in enumerate(off, 1) if error)
    return f"{name}: from step {first} on, by {max(off):.1e} at most"


if __name__ == "__main__":
    main()
