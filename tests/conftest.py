"""Make modules of the project's root, of tests/support and tests/tools importable, also in ranks."""

import gc
import sys
import traceback
from pathlib import Path

TESTS = Path(__file__).resolve().parent
# multiprocessing hands sys.path to each rank
sys.path[:0] = map(str, (TESTS.parent, TESTS, TESTS / "support", TESTS / "tools"))

import pytest

import ranks as rank_pool  # before torch, which reads the variables that it sets

import torch

# Importing torch's optimizers and pipelining compiles parts of them with a function that is
# deprecated. Only warnings from there are left out.
OF_TORCH = r"ignore:`torch\.jit\.\w+` is deprecated:DeprecationWarning:torch.jit._script"


def pytest_addoption(parser):
    parser.addoption("--mine", metavar="FILE", help="what the workbook judges")


def pytest_configure(config):
    if config.option.mine:
        config.mine = functions_of_reader(config.option.mine)
    config.addinivalue_line("filterwarnings", OF_TORCH)
    config.addinivalue_line("markers", "soak: long; left out of plain pytest, run by -m soak")


def functions_of_reader(path):
    """Return what judging.functions_of() does. pytest ends with an error if the file has one."""
    from judging import functions_of

    try:
        return functions_of(path)
    except Exception as error:
        text = "".join(traceback.format_exception_only(error))
        raise pytest.UsageError(f"--mine {path}: {text}") from error


def pytest_report_header():
    return f"torch {torch.__version__}"  # on Linux, pip may install a build with or without CUDA


def pytest_collection_modifyitems(config, items):
    if not config.option.markexpr:
        items[:] = [item for item in items if "soak" not in item.keywords]


def pytest_terminal_summary(terminalreporter, config):
    """With --mine, say what is right, and which functions the file lacks."""
    if config.option.mine is None:
        return
    reports = [*terminalreporter.getreports("passed"), *terminalreporter.getreports("skipped")]
    properties = [each for report in reports for each in report.user_properties]
    lacks = ", ".join(name for key, name in properties if key == "lacks")
    terminalreporter.section(config.option.mine)
    for key, text in properties:
        if key == "said":
            terminalreporter.write_line(text)
    terminalreporter.write_line(f"skipped, since the file does not define them: {lacks or 'none'}")


@pytest.fixture(scope="session", autouse=True)
def ranks():
    """Provide ranks.run(); end the pool's processes with the session."""
    yield rank_pool.run
    rank_pool.pool.close()


@pytest.fixture(autouse=True)
def seeded():
    """Seed the generators, so that a test's numbers do not depend on the tests before it."""
    rank_pool.seed_generators()
    gc.enable()  # hybrid.main() disables it


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """Provide the library of fake_cuda.py's device. Without a C++ compiler, tests are skipped."""
    import fake_cuda  # it imports all modules, which most files do not need

    path = fake_cuda.build(tmp_path_factory.mktemp("fake_cuda"))
    return path or pytest.skip("there is no C++ compiler: c++, g++ or clang++")
