"""The plain form of each technique computes, sends and keeps what its docstring says.

    pytest tests/test_ground_floors.py                          ours
    pytest tests/test_ground_floors.py --mine FILE              yours; what FILE lacks is skipped
"""

from pathlib import Path

import pytest

from exercises import EXERCISES
from judging import Wrong, judge


@pytest.mark.parametrize("name", EXERCISES)
def test_a_plain_form_computes_what_one_process_does_and_has_the_costs_of_its_docstring(
    name, pytestconfig, record_property
):
    path = pytestconfig.option.mine
    if path and name not in pytestconfig.mine:
        record_property("lacks", name)
        pytest.skip("--mine does not define it")
    fault = None
    try:
        said = judge(EXERCISES[name], path and str(Path(path).resolve()))
    except Wrong as wrong:
        fault = wrong
    if fault:  # not inside "except", where pytest would print it twice
        pytest.fail(f"{name}: {fault}", pytrace=False)
    record_property("said", f"{name}: {said}")
