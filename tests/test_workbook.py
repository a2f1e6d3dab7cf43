"""The workbook says what is wrong with wrong solutions, and lists and begins its exercises."""

import inspect
import re
import subprocess
import sys

import pytest

import plain_train
import workbook
from exercises import EXERCISES
from judging import Wrong, functions_of, judge
from ranks import PROJECT, run, soak, spawn

# {mistake: (exercise, a piece of our solution, what stands in its place, what is said of it)}
WRONG = {
    "each rank sends before it receives": (
        "ring_all_reduce",
        "plain_exchange([(outgoing, (rank + 1) % P)], [(arriving, (rank - 1) % P)], group)",
        "dist.send(outgoing, group=group, group_dst=(rank + 1) % P)\n"
        "        dist.recv(arriving, group=group, group_src=(rank - 1) % P)",
        "wrong on 2 ranks, right on 1; the limit for a message is 2 s\n"
        "rank 0: waited in vain for rank 1 to receive 262,144 bytes\n"
        "rank 1: waited in vain for rank 0 to receive 262,144 bytes",
    ),
    "it receives from the wrong neighbour": (
        "ring_all_reduce", "(rank - 1) % P", "(rank + 1) % P",
        "wrong on 3 ranks, right on 1 and 2; the limit for a message is 2 s\n"
        "rank 0: waited in vain for rank 1 to send 262,144 bytes\n"
        "rank 1: waited in vain for rank 2 to send 262,144 bytes\n"
        "rank 2: waited in vain for rank 0 to send 262,144 bytes",
    ),
    "a chunk's index is off by one": (
        "ring_all_reduce", "(rank - step - 2)", "(rank - step - 3)",
        "the tensor of 131,072 elements is wrong: element [",
    ),
    "the source is not named": (
        "ring_all_reduce",
        "plain_exchange([(outgoing, (rank + 1) % P)], [(arriving, (rank - 1) % P)], group)",
        "request = dist.isend(outgoing, group=group, group_dst=(rank + 1) % P)\n"
        "        dist.recv(arriving, group=group)\n"
        "        request.wait()",
        "ranks 0 and 1: a message is received from any rank, so it may be another: name its source",
    ),
    "chunks have unlike lengths": (
        "ring_all_reduce", "torch.empty_like(own)", "torch.empty_like(chunks[-1])",
        "rank 0: a tensor of 8 bytes receives 12 from rank 1",
    ),
    "the group is not passed on": (
        "ring_all_reduce", ", group)\n        if", ")\n        if",
        "wrong on 2 ranks, right on 1\n"
        "ranks 0 and 1: a message is sent or received among all ranks: pass `group` on",
    ),
    "torch's all-reduce is called": (
        "ring_all_reduce", "rank, P =", "dist.all_reduce(tensor, group=group)\n    rank, P =",
        "torch.distributed.all_reduce() is called: this exercise is to build all_reduce",
    ),
    "our all-reduce is called": (
        "ring_all_reduce", "rank, P =", "all_reduce(tensor, group=group)\n    rank, P =",
        "rank 0: all_reduce() is called: this exercise is to build all_reduce",
    ),
    "one rank fails": (
        "ring_all_reduce", "torch.empty_like(own)", "torch.empty_like(chunks[rank + 1])",
        "wrong on 2 ranks, right on 1\nrank 1: an error\nTraceback",
        "IndexError: tuple index out of range\n\nrank 0: waited in vain for rank 1 to ",
    ),
    "one rank never returns": (
        "ring_all_reduce", "rank, P = rank_and_size(group)",
        "rank, P = rank_and_size(group)\n    while P == 2 and rank:\n        pass",
        "wrong on 2 ranks, right on 1\nrank 1: has not returned\nrank 0: waited in vain for rank 1",
        "a rank does not return: it is in line ", "mine.py, in ring_all_reduce()",
    ),
    "one rank dies": (
        "ring_all_reduce", "rank, P = rank_and_size(group)",
        "rank, P = rank_and_size(group)\n    if P == 2 and rank:\n        import os; os._exit(7)",
        "rank 1: has not returned\nrank 0: waited in vain for rank 1",
        "a rank died with exit code 7",
    ),
    "a message has the strides of a view": (
        "one_f_one_b_step", "    rank, world_size = rank_and_size(group)",
        "    rank, world_size = rank_and_size(group)\n"
        "    exchange([(torch.empty(2, 3).T, 0)], [], group)",
        "rank 0: an error\nTraceback", "ValueError: not contiguous", "torch.empty(x.shape) is",
    ),
    "a peer does not exist": (
        "gpipe_step", "    rank, world_size = rank_and_size(group)",
        "    rank, world_size = rank_and_size(group)\n"
        "    exchange([(torch.empty(1), world_size)], [], group)",
        "rank 0: a message is to or from rank 1, but the ranks are 0 to 0",
    ),
    "the own chunk is missing": (
        "plain_all_gather", "chunks[rank].copy_(input.view(-1))", "",
        "output is wrong: element [0, 0] is 99, not",
    ),
    "the own chunk of many is missing": (
        "plain_all_to_all", "arriving[rank].copy_(outgoing[rank])", "",
        "output is wrong: element [0, 0] is 99, not",
    ),
    "a maximum in place of a sum": (
        "plain_reduce_scatter", "torch.add", "torch.maximum", "output is wrong: element [0] is",
    ),
    "another algorithm than it says": (
        "plain_all_reduce", "_all_reduce(algorithm", "_all_reduce('naive'",
        "wrong on 3 ranks, right on 1 and 2\n"
        "ranks 0, 1 and 2: 1,572,864 bytes are sent, 524,288 too many: "
        "1,048,576 is right, by all_reduce_cost() of 'ring' for 786,432",
    ),
    "gradients are averaged twice": (
        "average_gradients", "all_reduce(parameter.grad",
        "parameter.grad /= dist.get_world_size(group)\n            all_reduce(parameter.grad",
        "the gradient of 0.weight is wrong: element [0, 0] is",
        "All are 1/2 of what is right: a mean that should be a sum, or a second mean",
    ),
    "gradients are summed": (
        "average_gradients", "AVG", "SUM",
        "All are 2 times too large: a sum that should be a mean, or a second sum",
    ),
    "gradients are not reduced": (
        "average_gradients", "all_reduce(parameter.grad, ReduceOp.AVG, group)", "pass",
        "It is this rank's own: no mean is taken",
    ),
    "everything is sent to everyone": (
        "average_gradients", "AVG, group)", "AVG, group, algorithm='naive')",
        "wrong on 3 ranks, right on 1 and 2\nranks 0, 1 and 2: ", " is right, 2(P-1)/P of ",
    ),
    "a rank without a gradient skips it": (
        "average_gradients", "if parameter.requires_grad:", "if parameter.grad is not None:",
        "rank 0: waited in vain for rank 1 to ", "the gradient of 4.weight is None",
    ),
    "a bucket begins when it should be done": (
        "Bucket", "all_reduce(self.flat, ReduceOp.AVG, self.group, async_op=True)",
        "self\n        self.wait = lambda: all_reduce(self.flat, ReduceOp.AVG, self.group)",
        "an all-reduce begins after backward, when nothing is left to overlap with",
    ),
    "backward waits for a bucket": (
        "Bucket", "async_op=True)",
        "async_op=False)\n        self.work = self\n        self.wait = list",
        "backward waits for an all-reduce: pass async_op=True, and wait in finish()",
    ),
    "a shard's gradients are summed": (
        "sharded_step", "layout, update, group",
        "layout, lambda weights, gradient: update(weights, gradient * layout.world_size), group",
        "the gradient of scale that update() gets is wrong", "All are 2 times too large",
    ),
    "each rank has the whole optimizer state": (
        "sharded_step", "update_shard(parameters, shard_gradient, layout, update, group)",
        "for p in parameters:\n"
        "        all_reduce(p.grad, ReduceOp.AVG, group)\n"
        "        update(p.detach(), p.grad)",
        "update() gets a gradient of shape (), where a flat shard is right, 1/1 of ",
    ),
    "a unit stays whole until backward": (
        "fsdp_forward", "sharded_forward(unit, x, shard, layout, group)",
        "functional_call(unit, dict(zip([n for n, _ in unit.named_parameters()], "
        "layout.views(all_gather_to_group(shard, 0, group)))), x)",
        "too few: ", " is right, 3(P-1)/P of ",
        "2(P-1)/P are sent if backward does not gather again",
    ),
    "units keep their parameters": (
        "fsdp_forward", "parameter.data.new_empty(0)", "parameter.data",
        "bytes of weights are kept: 1/",
    ),
    "f is missing": (
        "column_linear", "copy_to_group(x, group)", "x",
        "the gradient of x is wrong", "The result is right, so look at backward",
    ),
    "every rank adds the bias": (
        "row_linear", "F.linear(x, weight), group)\n    return z if bias is None else z + bias",
        "F.linear(x, weight, bias), group)\n    return z",
        "the result is wrong", "The bias is added on every rank, before the sum",
    ),
    "an MLP's backward has no sum": (
        "split_mlp", "column_linear(x, up, group=group)", "F.linear(x, up)",
        "the gradient of x is wrong", "is a sum missing, or one too many?",
    ),
    "heads are split, and q, k and v are not": (
        "split_attention", "flatten(0, 1)", "transpose(0, 1).flatten(0, 1)", "the result is wrong",
    ),
    "each rank looks up all tokens": (
        "split_embedding", ".masked_fill(~is_here.unsqueeze(-1), 0)", "", "the result is wrong",
    ),
    "the maximum is local": (
        "split_cross_entropy", "all_reduce(largest, ReduceOp.MAX, group)", "",
        "Each rank subtracts its own maximum, where it should be that of all ranks",
    ),
    "the mask is that of the first rank": (
        "simple_allgather_attention", "rank * q.shape[2]", "0",
        "The mask counts a rank's queries from 0, but they follow earlier ranks'",
    ),
    "keys get only their own rank's gradient": (
        "simple_allgather_attention", "k = all_gather_to_group(", "k = gather_from_group(",
        "the gradient of k is wrong", "is a sum missing, or one too many?",
    ),
    "results stay split by heads": (
        "simple_ulysses_attention", "return exchanged(y, cut=2, joined=1)", "return y",
        "the result has the shape (2, 2, 8, 8), not (2, 4, 4, 8)",
    ),
    "the order of 1F1B in the place of GPipe": (
        "gpipe_step", "    rank, world_size =",
        "    return one_f_one_b_step(stage, inputs, targets, loss_fn, group)\n"
        "    rank, world_size =",
        "activations of 1 microbatches are held, where 5 are right: the order is FBFBFBFBFB",
    ),
    "gradients come from the wrong side": (
        "gpipe_step", "(grad_output, rank + 1)", "(grad_output, rank - 1)",
        "rank 1: waited in vain for rank 0 to receive 128 bytes",
    ),
    "the warm-up is too short": (
        "one_f_one_b_step", "warmup = min(m, last - rank)", "warmup = 0",
        "activations of 1 microbatches are held, where 2 are right: the order is FBFBFBFBFB, "
        "whose warm-up is too short",
    ),
    "the warm-up is too long": (
        "one_f_one_b_step", "warmup = min(m, last - rank)", "warmup = min(m, last - rank + 1)",
        "activations of 2 microbatches are held, where 1 are right: the order is FFBFBFBFBB, "
        "whose warm-up is too long",
    ),
    "fewer microbatches than ranks": (
        "one_f_one_b_step", "warmup = min(m, last - rank)", "warmup = last - rank", "IndexError",
    ),
    "the router does not weigh results": (
        "switch_layer", "weights.unsqueeze(1) * ", "",
        "A token's result is not multiplied by its expert's probability",
    ),
    "results are not put back in order": (
        "switch_layer", "weights.unsqueeze(1) * switch(x, experts, compute, group)",
        "(weights.unsqueeze(1) * switch(x, experts, compute, group))[experts.argsort(stable=True)]",
        "Rows are sorted by expert, not as x is",
    ),
    "tokens get no gradient from experts": (
        "switch_layer", "compute, group)", "lambda rows: compute(rows.detach()), group)",
        "the gradient of x is wrong",
    ),
    "plain_step averages over dp": (
        "plain_step", 'all_reduce(parameter.grad, group=groups["dp"])',
        'all_reduce(parameter.grad, ReduceOp.AVG, groups["dp"])',
        "wrong on 2 x 2 x 2 ranks, right on 1 x 1 x 1, 4 x 1 x 1 and 3 x 1 x 2",
        "All are 1/2 of what is right",
    ),
    "plain_step does not sum over dp": (
        "plain_step", 'all_reduce(parameter.grad, group=groups["dp"])', "pass",
        "wrong on 2 x 2 x 2 ranks",
    ),
}


# Each of these costs two seconds and new processes.
HANGS = {
    "each rank sends before it receives", "it receives from the wrong neighbour",
    "one rank never returns",
    "a rank without a gradient skips it", "gradients come from the wrong side",
    "fewer microbatches than ranks", "chunks have unlike lengths",
}  # fmt: skip
IN_PLAIN_PYTEST = {
    "a chunk's index is off by one",
    "torch's all-reduce is called", "the group is not passed on", "gradients are averaged twice",
    "everything is sent to everyone", "backward waits for a bucket",
    "each rank has the whole optimizer state", "a unit stays whole until backward",
    "an MLP's backward has no sum", "every rank adds the bias", "the maximum is local",
    "the warm-up is too short", "the router does not weigh results",
}  # fmt: skip


def write(exercise, old, new, path):
    """Write our solution with a mistake to a file."""
    of = EXERCISES[exercise]
    lines = [f"import collectives, {of.module}"]
    lines += [f"globals().update(vars(collectives) | vars({of.module}) | {{'__name__': 'mine'}})"]
    for solution in workbook.solutions(of):
        lines.append(inspect.getsource(solution))
    text = "\n".join(lines)
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("mistake", [m if m in IN_PLAIN_PYTEST else soak(m) for m in WRONG])
def test_a_mistake_is_named_to_whoever_has_made_it(mistake, tmp_path):
    name, old, new, *said = WRONG[mistake]
    write(name, old, new, tmp_path / "mine.py")
    with pytest.raises(Wrong) as info:
        judge(EXERCISES[name], str(tmp_path / "mine.py"), limit=2 if mistake in HANGS else 20)
    print(info.value)  # pytest -rP shows it
    for part in said:
        assert part in str(info.value)


def test_the_list_has_every_exercise_in_the_order_of_readme_with_its_signature_and_solution(capsys):
    workbook.main([])
    printed = capsys.readouterr().out
    names = re.findall(r"^(\w+)\(.*\)$", printed, re.M)
    assert names == [*EXERCISES] and len(names) >= 10
    files = re.findall(r"solution: (\w+\.py)", printed)
    text = (PROJECT / "README.md").read_text()
    assert sorted(files, key=text[text.index("| read first |") :].index) == files
    assert f"{len(EXERCISES)} functions and classes of the ground floors are exercises" in text
    assert "split_mlp(x, up, down, group=None)" in printed


@pytest.mark.parametrize("name", EXERCISES)
def test_a_file_to_begin_with_can_be_imported_and_ends_where_the_solution_begins(
    name, tmp_path, capsys
):
    path = tmp_path / "mine.py"
    workbook.main([name, "--file", str(path)])
    begun = functions_of(path)
    assert [*begun] == [*EXERCISES[name].names]
    for function, solution in zip(begun.values(), workbook.solutions(EXERCISES[name])):
        assert inspect.getdoc(function) == inspect.getdoc(solution)
        assert str(inspect.signature(function)) == str(inspect.signature(solution))
        parameters = inspect.signature(function).parameters.values()
        needed = [p for p in parameters if p.default is p.empty and p.kind != p.VAR_KEYWORD]
        with pytest.raises(NotImplementedError):
            function(*needed)
    assert f"--mine {path}" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        workbook.main([name, "--file", str(path)])


def test_plain_training_has_the_losses_of_one_process():
    losses, *_ = run(4, plain_train.train, pp=2, tp=2, microbatches=2, steps=2, mine=None)
    for loss, alone in losses:
        assert loss == pytest.approx(alone, rel=1e-5)


@pytest.mark.soak
def test_plain_training_uses_the_readers_functions(tmp_path):
    write("split_mlp", "column_linear(x, up, group=group)", "F.linear(x, up)", tmp_path / "mine.py")
    mine = str(tmp_path / "mine.py")  # its first forward is right, and its backward is not
    losses, *_ = spawn(2, plain_train.train, pp=1, tp=2, microbatches=2, steps=2, mine=mine)
    (loss, alone), (next_loss, next_alone) = losses
    assert loss == pytest.approx(alone, rel=1e-5)
    assert next_loss != pytest.approx(next_alone, rel=1e-5)


@pytest.mark.soak
def test_what_a_file_lacks_is_skipped_and_what_is_right_is_said(tmp_path):
    """Also by a path that is relative, and next to what the file only imports."""
    write("ring_all_reduce", "rank, P =", "rank, P =", tmp_path / "mine.py")
    path = PROJECT / "tests/test_ground_floors.py"
    command = [sys.executable, "-m", "pytest", path, "--mine", "mine.py", "-p", "no:cacheprovider"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
    said = "ring_all_reduce: right on 1, 2, 3 and 4 ranks; 1,572,864 bytes sent by each of 4 ranks"
    assert f"{said}, 2(P-1)/P of 1,048,576" in done.stdout
    lacks = [name for name in EXERCISES if name != "ring_all_reduce"]
    assert f"skipped, since the file does not define them: {', '.join(lacks)}" in done.stdout
    assert f"1 passed, {len(EXERCISES) - 1} skipped" in done.stdout
