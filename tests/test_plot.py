"""plot.py draws every action of a schedule, and every number of a --metrics file, where it is."""

import json
import math
import shlex
from collections import Counter
from xml.etree import ElementTree

import pytest

import plot
from pipeline import SCHEDULES
from ranks import PROJECT

PICTURES = {  # README's, and the flags that draw them
    "1f1b.svg": "--schedule 1f1b",
}


def elements(drawn, kind):
    """Return the attributes of all elements of a kind."""
    root = ElementTree.fromstring(drawn)
    return [each.attrib for each in root.iter("{http://www.w3.org/2000/svg}" + kind)]


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_action_is_a_box_of_its_length_and_no_two_boxes_of_a_rank_overlap(name):
    schedule = SCHEDULES[name](4, 8)
    boxes = elements(plot.draw_schedule(name, 4, 8), "rect")
    kinds = Counter(action.kind for actions in schedule for action in actions)
    for kind, slots in {"F": 1, "B": 2, "I": 1, "W": 1}.items():
        own = [box for box in boxes if box["fill"] == plot.OF_ACTIONS[kind]]
        own = [box for box in own if float(box["height"]) == plot.ROW]  # without the legend's
        assert len(own) == kinds[kind]
        assert all(float(box["width"]) == slots * plot.SLOT for box in own)
    idle = plot.OF_ACTIONS["idle"], "white"
    rows = {}
    for box in boxes:
        if box["fill"] not in idle and float(box["height"]) == plot.ROW:
            rows.setdefault(box["y"], []).append((float(box["x"]), float(box["width"])))
    assert len(rows) == 4
    for row in rows.values():
        row.sort()
        assert all(x + width <= after for (x, width), (after, _) in zip(row, row[1:]))


def test_pairs_are_boxes_of_three_slots_with_two_numbers():
    drawn = plot.draw_schedule("dualpipe-v", 4, 8, overlap=True)
    boxes = [box for box in elements(drawn, "rect") if box["fill"] == plot.OF_ACTIONS["pair"]]
    pairs = [box for box in boxes if float(box["height"]) == plot.ROW]
    assert pairs and {float(box["width"]) for box in pairs} == {3 * plot.SLOT}
    assert drawn.count("+") == len(pairs)


def test_runs_have_a_curve_of_all_steps_dots_for_validations_and_the_flags_that_differ(tmp_path):
    for name, rate in (("a", 0.001), ("b", 0.01)):
        lines = [{"flags": {"lr": rate, "weight_decay": 0.1, "tp": 2}}]
        for step in range(1, 11):
            loss = math.nan if step == 3 else 5 - rate * step
            lines.append({"step": step, "loss": loss, "tokens_per_s": 9, "tokens_seen": 64 * step})
        lines += [{"step": 10, "loss": 1.5, "tokens_per_s": 9, "tokens_seen": 640}]  # done again
        lines += [{"step": 10, "validation_loss": 2.0}]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    files = [str(tmp_path / name) for name in ("a.jsonl", "b.jsonl")]
    for over in ("step", "tokens_seen"):
        plot.main([*files, "--over", over, "--out", str(tmp_path / "runs.svg")])
        drawn = (tmp_path / "runs.svg").read_text()
        losses, *_, speeds = [line["points"].split() for line in elements(drawn, "polyline")]
        assert len(losses) == 9 and len(speeds) == 10
        height = lambda point: float(point.split(",")[1])
        assert height(losses[-1]) == max(map(height, losses))  # the last is the lowest loss
        dots = elements(drawn, "circle")
        assert len(dots) == 2 and {dot["cx"] for dot in dots} == {losses[-1].split(",")[0]}
        assert "a.jsonl  --lr 0.001<" in drawn and "b.jsonl  --lr 0.01<" in drawn


@pytest.mark.parametrize("low, high", [(0, 1), (1.2, 1.3), (5, 5), (0, 200_000), (-3, 8)])
def test_ticks_are_a_few_round_numbers_inside(low, high):
    found = plot.ticks(low, high)
    assert 1 <= len(found) <= 7 and low - 1e-9 <= found[0] and found[-1] <= high + 1e-9


@pytest.mark.parametrize("name", PICTURES)
def test_readme_shows_the_pictures_that_these_flags_draw(name, tmp_path):
    plot.main([*shlex.split(PICTURES[name]), "--out", str(tmp_path / name)])
    drawn = (tmp_path / name).read_text()
    assert (PROJECT / "tests/tools" / name).read_text() == drawn, f"plot.py {PICTURES[name]}"
    assert f"(tests/tools/{name})" in (PROJECT / "README.md").read_text()


@pytest.mark.parametrize("words", [[], ["a.jsonl", "--schedule", "1f1b"]])
def test_either_files_or_a_schedule_is_drawn(words):
    with pytest.raises(SystemExit):
        plot.main(words)
