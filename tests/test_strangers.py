"""Scripts as a PyTorch user writes them, run as one runs them: under torchrun, left the normal way."""

import os
import subprocess
import sys
import textwrap

import pytest

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

USES = {
    "operations in the background": """
        for _ in range(10):
            all_reduce(torch.ones(1000), async_op=True).wait()
        group = dist.new_group([0, 1])
        for _ in range(3):  # nobody awaits them, nor the 20 that are pending at the end
            all_reduce(torch.ones(1000), group=group, async_op=True)
        x = torch.ones(1 << 20)
        works = [all_reduce(x, async_op=True) for _ in range(20)]
        dist.destroy_process_group()
        """,
    "operations in a group that is never destroyed": """
        x = torch.ones(1 << 20)
        works = [all_reduce(x, async_op=True) for _ in range(20)]
        """,
    "training": """
        def train(wrap, optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1)):
            model = wrap(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8)))
            optimizer = optimizer(model)
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.randn(16, 64)).square().mean().backward()
                optimizer.step()

        def zero(**how):
            return lambda model: ZeroRedundancyOptimizer(
                model.parameters(), torch.optim.SGD, lr=0.1, **how
            )

        def split(model):
            model[0] = ColumnParallelLinear(64, 64, group=dist.group.WORLD)
            model[2] = RowParallelLinear(64, 8, group=dist.group.WORLD)
            return model

        train(DistributedDataParallel)
        train(lambda model: model, zero())
        train(lambda model: model, zero(shard_gradients=True))
        train(lambda model: FullyShardedDataParallel(model, units=[model[0], model[2]]))
        train(split)
        dist.destroy_process_group()
        """,
}


@pytest.mark.parametrize("use", USES)
def test_a_script_that_leaves_the_normal_way_exits_with_0(use, tmp_path):
    script = """
        import torch
        import torch.distributed as dist
        from torch import nn
        from collectives import all_reduce, report_stalls
        from ddp import DistributedDataParallel
        from tensor_parallel import ColumnParallelLinear, RowParallelLinear
        from zero import FullyShardedDataParallel, ZeroRedundancyOptimizer

        dist.init_process_group("gloo")
        report_stalls(30)
        """
    for _ in range(2):
        done = launch(tmp_path, 2, textwrap.dedent(script) + textwrap.dedent(USES[use]))
        assert done.returncode == 0, done.stderr


# ---- ddp.py --------------------------------------------------------------------------------------


# ---- zero.py -------------------------------------------------------------------------------------


# ---- pipeline.py ---------------------------------------------------------------------------------


# ---- hybrid.py -----------------------------------------------------------------------------------
