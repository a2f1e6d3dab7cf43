"""The workbook: write a function of a ground floor yourself, and let the tests judge it.

    python tests/tools/workbook.py                              lists the exercises
    python tests/tools/workbook.py ring_all_reduce              writes mine.py, to begin with
    pytest tests/test_ground_floors.py --mine mine.py           judges what it defines

A file may define several of the functions; --file is the name of the one to write. A message that
is not received in 20 seconds is a deadlock, and ends with what each rank has waited for.

Bytes are counted, so torch.distributed's own collectives are refused. Exercises of collectives.py
may use its send, recv, isend, irecv and batch_isend_irecv, or plain_exchange(). The others may use
all of collectives.py.
"""

import argparse
import ast
import importlib
import inspect
import sys
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS.parent), str(TESTS / "support"), str(TESTS / "tools")]

from exercises import EXERCISES

FROM_TORCH = """\
import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
"""
FROM_HERE = {  # {module: what its exercises may need of the others}
    "collectives": "from collectives import plain_exchange, rank_and_size",
    "ddp": "from collectives import ReduceOp, all_reduce\nfrom ddp import grad_dtype",
    "zero": "from torch.func import functional_call\n"
            "from torch.utils.checkpoint import checkpoint\n\n"
            "from collectives import (\n"
            "    ReduceOp, all_gather_single, all_gather_to_group, rank_and_size,"
            " reduce_scatter_single,\n)\n"
            "from zero import PlainLayout",
    "tensor_parallel": "from collectives import (\n"
                       "    ReduceOp, all_reduce, copy_to_group, rank_and_size, reduce_from_group,"
                       "\n)",
    "sequence_parallel": "from collectives import all_gather_to_group, all_to_all_in_group,"
                         " rank_and_size",
    "pipeline": "from collectives import exchange, rank_and_size",
    "expert_parallel": "from collectives import all_to_all_in_group, rank_and_size",
    "hybrid": "from collectives import all_reduce, rank_and_size\n"
              "from pipeline import one_f_one_b_step",
}  # fmt: skip


def solutions(exercise):
    """Return the functions or classes that an exercise asks for, as they stand in its module."""
    module = importlib.import_module(exercise.module)
    return [getattr(module, name) for name in exercise.names]


def without_bodies(source):
    """Return the source of a function or class, in which functions end after their docstrings."""
    lines = source.splitlines()
    (node,) = ast.parse(source).body
    functions = [node]
    if isinstance(node, ast.ClassDef):
        functions = [part for part in node.body if isinstance(part, ast.FunctionDef)]
    kept = lines[: functions[0].lineno - 1]
    for function in functions:
        first = function.body[0]
        end = first.end_lineno if ast.get_docstring(function) else first.lineno - 1
        kept += lines[function.lineno - 1 : end]
        kept += [" " * first.col_offset + "raise NotImplementedError", ""]
    return "\n".join(kept).rstrip()


def beginning(exercise):
    """Return the text of a file to begin an exercise with."""
    parts = [without_bodies(inspect.getsource(each)) for each in solutions(exercise)]
    others = f"# for a docstring that is named here: python -m pydoc {exercise.module}.NAME"
    parts[0] = f"# checked: {exercise.checked}\n{others}\n{parts[0]}"
    return "\n\n\n".join([f"{FROM_TORCH}\n{FROM_HERE[exercise.module]}", *parts]) + "\n"


def listing():
    """Return a paragraph for each exercise."""
    text = []
    for name, exercise in EXERCISES.items():
        solution, *helpers = solutions(exercise)
        sentence, *_ = inspect.getdoc(solution).split("\n\n")
        text.append(f"{name}{inspect.signature(solution)}")
        text += [f"    {line}" for line in sentence.splitlines()]
        if helpers:
            text.append(f"    together with {', '.join(each.__name__ for each in helpers)}()")
        text.append(f"    checked: {exercise.checked}")
        text.append(f"    solution: {exercise.module}.py\n")
    return "\n".join(text)


def main(words=None):
    parser = argparse.ArgumentParser(prog="workbook.py", description=__doc__.partition("\n")[0])
    parser.add_argument("name", nargs="?", choices=EXERCISES, metavar="NAME",
                        help="an exercise; without it, all are listed")
    parser.add_argument("--file", type=Path, default="mine.py", help="what to write (mine.py)")
    args = parser.parse_args(words)
    if args.name is None:
        print(listing(), end="")
        return
    try:
        with open(args.file, "x") as file:
            file.write(beginning(EXERCISES[args.name]))
    except FileExistsError:
        parser.error(f"{args.file} exists; name another file with --file")
    print(f"{args.file} is written. Judge it by\n")
    print(f"    pytest {TESTS / 'test_ground_floors.py'} --mine {args.file}")


if __name__ == "__main__":
    main()
