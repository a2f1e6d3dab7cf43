"""record.py names what differs from another commit, on any rank, and the first step that does."""

import copy

import pytest

import record

THEN = {  # of two ranks, as record() returns it for a layout
    "losses": [[4.0, 2.0, 1.0], [4.0, 2.0, 1.0]],
    "norms": [[8.0, 8.0, 8.0], [8.0, 8.0, 8.0]],
    "weights": [["a1", "b2"], ["c3", "d4"]],
    "bytes": [96, 64],
    "batches": [{"dp": 2}, {"dp": 2}],
    "waits": [{"item": 1}, {"item": 1}],
    "memory": "parameters, MB  1.000",
}


def compared(now, capsys):
    """Return whether nothing differs, and the lines that compare() prints."""
    is_same = record.compare("2 | --dp 2", THEN, now)
    return is_same, capsys.readouterr().out.splitlines()


def test_a_layout_that_has_not_moved_is_the_same(capsys):
    assert compared(copy.deepcopy(THEN), capsys) == (True, ["2 | --dp 2: the same"])


@pytest.mark.parametrize("name", THEN)
def test_what_differs_on_the_last_rank_alone_is_named(name, capsys):
    now = copy.deepcopy(THEN)
    if name == "memory":
        now[name] = "parameters, MB  2.000"
    else:
        now[name][1] = {"losses": [4.0, 2.0, 1.5], "bytes": 65}.get(name, ["other"])
    is_same, (title, *_) = compared(now, capsys)
    assert not is_same and title == f"2 | --dp 2: {name} differ"


def test_the_first_step_that_differs_counts_from_1_and_the_largest_difference_is_relative(capsys):
    now = copy.deepcopy(THEN) | {"losses": [[4.0, 3.0, 1.25]] * 2}
    _, lines = compared(now, capsys)
    assert lines[1:] == ["    losses: from step 2 on, by 5.0e-01 at most"]
