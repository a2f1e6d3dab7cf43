"""Scripts as a PyTorch user writes them, run as one runs them: under torchrun, left the normal way."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from pipeline import simulate, trace_events, zb_v
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


HYBRID = (PROJECT / "hybrid.py").read_text()
SMALL = "--hidden 16 --heads 2 --seq-len 16"


def complaints(done):
    """The lines of hybrid.py on stderr; that there is no traceback out of it."""
    assert 'hybrid.py", line' not in done.stderr and 'script.py", line' not in done.stderr
    return [line for line in done.stderr.splitlines() if line.startswith("hybrid.py: ")]


def read_metrics(file):
    """The objects of a file of metrics; only what JSON knows of is in it."""
    wrong = lambda constant: pytest.fail(f"{constant} is not JSON")
    return [json.loads(line, parse_constant=wrong) for line in file.read_text().splitlines()]


def test_torchrun_and_one_process_write_the_same_metrics_and_a_trace(tmp_path):
    flags = f"{SMALL} --schedule zb-v --microbatches 4 --layers 4 --steps 3 --metrics".split()
    command = [sys.executable, PROJECT / "hybrid.py", *flags, tmp_path / "one"]
    one = subprocess.run(command, cwd=tmp_path, timeout=120, capture_output=True, text=True)
    layout = [tmp_path / "four", "--pp", 2, "--tp", 2, "--trace", tmp_path / "trace"]
    four = launch(tmp_path, 4, HYBRID, *flags, *layout)
    for done in (one, four):
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        assert [line.split()[:2] for line in lines[:3]] == [["step", str(k)] for k in (1, 2, 3)]
        assert all(word in lines[0] for word in ("loss", "grad norm", "lr", "tokens/s", "MB"))
        assert lines[3].startswith("validation loss ") and "---- continuation" in lines
    metrics = [read_metrics(tmp_path / name) for name in ("one", "four")]
    names = {"step", "loss", "grad_norm", "lr", "tokens_per_s", "memory_mb"}
    for ours, theirs in zip(*metrics, strict=True):
        assert ours.keys() == theirs.keys() == names
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-5)
    # full precision, not the printed four digits
    assert len(metrics[0]) == 3 and len(str(metrics[0][0]["loss"])) > 8
    events = json.loads((tmp_path / "trace").read_text())["traceEvents"]
    simulated = trace_events(simulate(zb_v(2, 4)))
    what = lambda events: sorted((e["tid"], e["name"], *e["args"].values()) for e in events)
    assert what(events) == what(simulated) and events[0].keys() == simulated[0].keys()
    begun = {(e["tid"], e["cat"], *e["args"].values()): e["ts"] for e in events}
    assert begun[0, "F", 0, 0] < begun[1, "F", 0, 0] < begun[1, "F", 0, 1] < begun[0, "I", 0, 1]
    assert all(event["dur"] > 0 for event in events)


def test_three_processes_train_to_the_end_on_a_full_disk_with_more_tokens_than_bytes(tmp_path):
    flags = f"{SMALL} --steps 2 --vocab-size 300 --metrics /dev/full --trace /dev/full".split()
    done = launch(tmp_path, 3, HYBRID, *flags)
    assert done.returncode == 0, done.stderr
    assert complaints(done) == 2 * ["hybrid.py: error: /dev/full: No space left on device"]
    assert "\nvalidation loss " in done.stdout and "\n---- continuation\n" in done.stdout


def test_a_restart_appends_to_the_metrics_and_divergence_ends_in_one_line(tmp_path, monkeypatch):
    script = """
        import os, signal, sys
        import torch
        import hybrid

        attempt, step, steps = os.environ["TORCHELASTIC_RESTART_COUNT"], torch.optim.AdamW.step, []

        def die_in_second_step(self, *arguments):
            steps.append(None)
            if len(steps) == 2 and attempt == "0" and os.environ["RANK"] == "1":
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, *arguments)

        torch.optim.AdamW.step = die_in_second_step
        os._exit(hybrid.main([*sys.argv[1:], "--lr", "0.001" if attempt == "0" else "1e30"]))
    """
    monkeypatch.setenv("PET_MAX_RESTARTS", "1")  # torchrun's --max-restarts
    flags = f"{SMALL} --steps 4 --warmup 0 --metrics {tmp_path / 'metrics'}".split()
    done = launch(tmp_path, 2, script, *flags)
    assert done.returncode != 0
    steps = [line["step"] for line in read_metrics(tmp_path / "metrics")]
    assert steps in ([1, 1], [1, 2, 1])  # rank 0 may have written its second step
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("hybrid.py: ")]
    assert line == "hybrid.py: error: step 2 is not finite: loss nan, grad norm nan, lr 8.68e+29"


def test_an_interrupt_is_one_line_also_of_ranks_that_wait(tmp_path):
    script = """
        import os, signal, sys, time
        import torch

        step = torch.optim.AdamW.step

        def interrupt(self, *arguments):
            if os.environ["RANK"] == "1":
                os.kill(os.getppid(), signal.SIGINT)  # Ctrl-C reaches torchrun, which passes it on
                time.sleep(60)
            return step(self, *arguments)

        torch.optim.AdamW.step = interrupt
        sys.argv[0] = HYBRID
        exec(compile(open(HYBRID).read(), HYBRID, "exec"))
    """
    script = script.replace("HYBRID", repr(str(PROJECT / "hybrid.py")))
    done = launch(tmp_path, 3, script, *SMALL.split())
    assert done.returncode != 0
    assert complaints(done) == ["hybrid.py: interrupted"]


def test_help_and_faults_of_one_machine_are_said_once(tmp_path):
    script = """
        import os, sys
        import hybrid

        hybrid.main(["--help"])
        sys.exit(hybrid.main(["--data", "MISSING"] if os.environ["RANK"] == "2" else []))
    """
    done = launch(tmp_path, 3, script)
    assert done.returncode != 0 and done.stdout.count("usage: hybrid.py") == 1
    missing = "rank 2: --data MISSING: no such file or folder"
    assert complaints(done) == [f"hybrid.py: error: {missing}"]
