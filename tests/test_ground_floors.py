"""The plain form of each technique computes, sends and keeps what its docstring says.

    pytest tests/test_ground_floors.py                          ours
    pytest tests/test_ground_floors.py --mine FILE              yours; what FILE lacks is skipped
"""

from pathlib import Path

import pytest

from exercises import EXERCISES
from judging import Wrong, functions_of, judge


@pytest.mark.parametrize("name", EXERCISES)
def test_a_plain_form_computes_what_one_process_does_and_has_the_costs_of_its_docstring(
    name, pytestconfig, record_property
):
    path = pytestconfig.option.mine and str(Path(pytestconfig.option.mine).resolve())
    if path and name not in functions_of(path):
        record_property("said", f"{name}: skipped, since the file does not define it")
        pytest.skip()
    try:
        said = judge(EXERCISES[name], path)
    except Wrong as wrong:
        pytest.fail(f"{name}: {wrong}", pytrace=False)
    record_property("said", f"{name}: {said}")
