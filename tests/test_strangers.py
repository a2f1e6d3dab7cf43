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


# ---- hybrid.py -----------------------------------------------------------------------------------
