"""Draw runs of hybrid.py, or a pipeline schedule, in an .svg file, which a browser opens.

    python tests/tools/plot.py FILE.jsonl [FILE.jsonl ...]         losses, validations, tokens/s
    python tests/tools/plot.py --schedule dualpipe-v --stages 4 --microbatches 8 --overlap

A FILE.jsonl is what --metrics has written. --over tokens_seen draws over tokens in the place of
steps. Beside each run stand the flags in which the runs differ. --out names the file to write.
"""

import argparse
import json
import math
import sys
from html import escape
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[2])]

from pipeline import SCHEDULES, PairedSchedule, pairs_of, simulate

OF_RUNS = "#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e", "#17becf", "#8c564b", "#7f7f7f"
OF_ACTIONS = {
    "F": "#9ecae1", "B": "#fdae6b", "I": "#fdd0a2", "W": "#a1d99b", "pair": "#bcbddc",
    "idle": "#eeeeee",
}  # fmt: skip
MEANINGS = {
    "F": "forward", "B": "backward", "I": "gradient of the input", "W": "gradient of the weights",
    "pair": "a forward and a backward in turns", "idle": "idle",
}  # fmt: skip


# ---- elements ------------------------------------------------------------------------------------


def element(name, content=None, **attributes):
    """Return an element of an SVG. In the names of attributes, _ stands for -."""
    words = [f'{key.replace("_", "-")}="{escape(str(value))}"' for key, value in attributes.items()]
    opening = " ".join([name, *words])
    return f"<{opening}/>" if content is None else f"<{opening}>{content}</{name}>"


def text(x, y, words, anchor="start", **attributes):
    return element("text", escape(words), x=x, y=y, text_anchor=anchor, **attributes)


def rectangle(x, y, width, height, color):
    return element("rect", x=x, y=y, width=width, height=height, fill=color, stroke="white")


def picture(width, height, parts):
    """Return the text of an SVG file with these elements on white."""
    size = {"width": width, "height": height, "viewBox": f"0 0 {width} {height}"}
    background = element("rect", width=width, height=height, fill="white")
    content = "\n".join(["", background, *parts, ""])
    font = {"font_family": "sans-serif", "font_size": 12}
    return element("svg", content, xmlns="http://www.w3.org/2000/svg", **size, **font) + "\n"


# ---- a schedule ----------------------------------------------------------------------------------

SLOT = 24  # the width of a slot of time
ROW = 28  # the height of a rank's row
LEFT = 60  # the width of a rank's name


def draw_schedule(name, num_stages, num_microbatches, overlap=False):
    """Return a picture of a schedule in which F takes one slot, B two, and I and W one each.

    overlap: with pairs of a forward and a backward, as hybrid.py has with --overlap
    """
    schedule = SCHEDULES[name](num_stages, num_microbatches)
    if overlap:
        schedule = PairedSchedule(schedule)
    timeline = simulate(schedule)
    width = LEFT + SLOT * int(timeline.total) + 20
    title = f"{name}: {num_stages} ranks, {num_microbatches} microbatches"
    parts = [text(10, 20, title, font_weight="bold")]
    used = set()
    for rank in range(num_stages):
        y = 34 + ROW * rank
        parts.append(text(10, y + 18, f"rank {rank}"))
        parts.append(rectangle(LEFT, y, SLOT * int(timeline.total), ROW, OF_ACTIONS["idle"]))
        pairs = pairs_of(schedule[rank]) if overlap else {}
        for first in schedule[rank]:
            if first in pairs.values():
                continue  # it is drawn with the forward before it
            last = pairs.get(first, first)
            begin = timeline.start[rank][first]
            slots = timeline.end[rank][last] - begin
            kind = first.kind if first is last else "pair"
            used.add(kind)
            x = LEFT + SLOT * begin
            parts.append(rectangle(x, y, SLOT * slots, ROW, OF_ACTIONS[kind]))
            numbers = f"{first.microbatch}"
            if first in pairs:
                numbers += f"+{last.microbatch}"
            weight = "bold" if first.chunk else "normal"
            middle = x + SLOT * slots / 2
            parts.append(text(middle, y + 18, numbers, "middle", font_weight=weight))
    y = 34 + ROW * num_stages + 12
    x = LEFT
    for kind, color in OF_ACTIONS.items():
        if kind in used or kind == "idle":
            parts.append(rectangle(x, y, 14, 14, color))
            parts.append(text(x + 20, y + 12, MEANINGS[kind]))
            x += 40 + 7 * len(MEANINGS[kind])
    if any(action.chunk for row in schedule for action in row):
        parts.append(text(x, y + 12, "bold: a rank's second chunk of layers"))
        x += 240
    return picture(max(width, x), y + 26, parts)


# ---- runs ----------------------------------------------------------------------------------------


def read_run(path):
    """Return (flags, {step: metrics}) of a --metrics file.

    If a run was resumed, its flags stand there several times, and some steps twice. The last count.
    """
    flags = {}
    steps = {}
    for line in Path(path).read_text().splitlines():
        values = json.loads(line)
        if "flags" in values:
            flags = values["flags"]
        else:
            steps.setdefault(values["step"], {}).update(values)
    return flags, steps


def points_of(steps, name, over):
    """Return the points (x, y) of a metric, for steps that have it. Numbers that are not finite go.

    A validation has no tokens_seen of its own if the file begins after its step.
    """
    points = []
    for step in sorted(steps):
        values = steps[step]
        if over in values and math.isfinite(values.get(name, math.nan)):
            points.append((values[over], values[name]))
    return points


def differing(all_flags):
    """Return a line for each run: the flags that are not the same in all of them."""
    names = dict.fromkeys(name for flags in all_flags for name in flags)
    unlike = [name for name in names if len({str(flags.get(name)) for flags in all_flags}) > 1]
    lines = []
    for flags in all_flags:
        lines.append(" ".join(f"--{name.replace('_', '-')} {flags.get(name)}" for name in unlike))
    return lines


def ticks(low, high):
    """Return about five round numbers from low to high."""
    raw = (high - low) / 5 or 1
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= raw)
    first = math.ceil(low / step)
    return [step * i for i in range(first, math.floor(high / step) + 1)]


def panel(top, title, over, curves, dots=()):
    """Return the elements of one diagram. curves, dots: lists of (points, color)."""
    left, width, height = 70, 700, 220
    points = [point for points, _ in (*curves, *dots) for point in points]
    if not points:
        return [text(left, top, f"{title}: none")]
    xs, ys = zip(*points)
    across = width / (max(xs) - min(xs) or 1)
    down = height / (max(ys) - min(ys) or 1)
    place_x = lambda x: round(left + across * (x - min(xs)), 1)
    place_y = lambda y: round(top + down * (max(ys) - y), 1)
    parts = [text(left, top - 10, title, font_weight="bold")]
    parts.append(text(left + width, top + height + 34, over, "end"))
    frame = {"fill": "none", "stroke": "black"}
    parts.append(element("rect", x=left, y=top, width=width, height=height, **frame))
    for tick in ticks(min(xs), max(xs)):
        parts.append(text(place_x(tick), top + height + 16, f"{tick:,g}", "middle"))
    for tick in ticks(min(ys), max(ys)):
        y = place_y(tick)
        parts.append(element("line", x1=left, x2=left + width, y1=y, y2=y, stroke="#dddddd"))
        parts.append(text(left - 6, y + 4, f"{tick:,g}", "end"))
    for points, color in curves:
        path = " ".join(f"{place_x(x)},{place_y(y)}" for x, y in points)
        parts.append(element("polyline", points=path, fill="none", stroke=color))
    for points, color in dots:
        for x, y in points:
            parts.append(element("circle", cx=place_x(x), cy=place_y(y), r=4, fill=color))
    return parts


def draw_runs(paths, over="step"):
    """Return a picture of --metrics files. over: "step" or "tokens_seen"."""
    runs = [read_run(path) for path in paths]
    colors = [OF_RUNS[i % len(OF_RUNS)] for i in range(len(runs))]
    curve = lambda name: [(points_of(steps, name, over), c) for (_, steps), c in zip(runs, colors)]
    parts = panel(40, "loss (dots: validation)", over, curve("loss"), curve("validation_loss"))
    parts += panel(340, "tokens per second", over, curve("tokens_per_s"))
    y = 620
    for path, color, flags in zip(paths, colors, differing([flags for flags, _ in runs])):
        parts.append(rectangle(70, y, 14, 14, color))
        parts.append(text(90, y + 12, f"{Path(path).name}  {flags}"))
        y += 20
    return picture(800, y + 10, parts)


def main(words=None):
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("files", nargs="*", metavar="FILE.jsonl")
    parser.add_argument("--over", choices=("step", "tokens_seen"), default="step")
    parser.add_argument("--schedule", choices=SCHEDULES)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--overlap", action="store_true", help="forwards and backwards in turns")
    parser.add_argument("--out", type=Path, default="plot.svg")
    args = parser.parse_args(words)
    if bool(args.files) == bool(args.schedule):
        parser.error("name files of --metrics, or a --schedule")
    if args.schedule:
        drawn = draw_schedule(args.schedule, args.stages, args.microbatches, args.overlap)
    else:
        drawn = draw_runs(args.files, args.over)
    args.out.write_text(drawn)
    print(f"{args.out} is written")


if __name__ == "__main__":
    main()
