"""Scripts as a PyTorch user writes them, run as one runs them: under torchrun, left the normal way."""

import os
import subprocess
import sys
import textwrap

from ranks import PROJECT


def launch(folder, world_size, script, *arguments, timeout=120):
    """Run the text of a script under torchrun; returns its CompletedProcess, with text output.

    The script finds the project's modules; its own file lies in `folder`.
    """
    file = folder / "script.py"
    file.write_text(textwrap.dedent(script))
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command = [*torchrun, f"--nproc-per-node={world_size}", str(file), *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(PROJECT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, env=environment, cwd=folder, timeout=timeout, capture_output=True, text=True
    )


# ---- collectives.py ------------------------------------------------------------------------------


# ---- ddp.py --------------------------------------------------------------------------------------


# ---- zero.py -------------------------------------------------------------------------------------


# ---- pipeline.py ---------------------------------------------------------------------------------


PIPELINE = """
    import torch, torch.distributed as dist
    from torch import nn
    from pipeline import Pipeline, forward_only, one_f_one_b, zb_h1

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    tokens, labels = torch.randint(50, (8, 6)), torch.randint(5, (8,))
    embed = nn.Embedding(50, 16).requires_grad_(False)
    model = nn.Sequential(embed, nn.Flatten(), nn.Linear(96, 32), nn.ReLU(inplace=True),
                          nn.Dropout(0.1), nn.Linear(32, 5))
    stage = model[:3] if rank == 0 else model[3:]
    optimizer = torch.optim.AdamW(stage.parameters(), lr=1e-2)
    share = lambda logits, labels: nn.functional.cross_entropy(logits, labels) / 4
    losses = []
    for make_schedule in (one_f_one_b, zb_h1):
        pipeline = Pipeline(stage.train(), make_schedule(2, 4), share)
        for _ in range(20):
            optimizer.zero_grad()
            losses.append(pipeline.step(tokens, labels))
            optimizer.step()
        stage.eval()
        with torch.inference_mode():
            loss = Pipeline(stage, forward_only(2, 4), share).step(tokens, labels)
        if rank == 1:
            assert max(loss, losses[-1]) < losses[0] / 2, (loss, losses)
    try:
        pipeline.step(tokens, labels if rank == 0 else labels[:4])
    except (ValueError, RuntimeError) as error:  # of its own, or of the connection that was closed
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
    dist.destroy_process_group()
"""


def test_a_pipeline_of_two_trains_and_one_that_fails_does_not_hang_the_other(tmp_path):
    done = launch(tmp_path, 2, PIPELINE)
    assert done.returncode == 0, done.stderr
    assert "rank 1: ValueError: inputs has 8 rows, targets has 4" in done.stdout
    assert "rank 0: RuntimeError: " in done.stdout


# ---- hybrid.py -----------------------------------------------------------------------------------
