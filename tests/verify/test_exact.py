"""`verify --exact`: the table passes; each mechanism that is switched off turns it red, named where it first shows."""

import functools

import pytest
import torch.distributed as dist

from drumline.parallel import exact
from drumline.parallel.exact import collect, replicated, sharded
from drumline.verify import EXACT_ROWS, candidate, of_exact_table, select_rows, verify_exact
from drumline.verify.exact import words


def result_of(row, num_steps=2):
    (case,) = of_exact_table([each for each in EXACT_ROWS if each.name == row]).cases
    (result,) = verify_exact([case], max_ranks=8, num_steps=num_steps)
    assert not result.failure, result.failure
    return result


def gloo_sums(monkeypatch):
    def all_reduce(parts, owners, group):
        for part in parts[1:]:
            parts[0] += part
        dist.all_reduce(parts[0], group=group)
        return parts[0]

    monkeypatch.setattr(replicated, "tree_all_reduce", all_reduce)


def micro_batches_are_one_lane(monkeypatch):
    real = collect.LaneSums
    monkeypatch.setattr(
        collect,
        "LaneSums",
        lambda owned, num_lanes, num_microbatches: _OneRun(real, owned, num_lanes, num_microbatches),
    )


class _OneRun:
    """All lanes of a rank one after the other, told as if each node had been summed."""

    def __init__(self, real, owned, num_lanes, num_microbatches):
        self._real = functools.partial(real, owned, num_lanes, num_microbatches)
        self._total = None

    def put(self, microbatch, grad):
        self._total = grad if self._total is None else self._total.add_(grad)
        self._last = microbatch

    def take(self):
        whole = self._real()
        for number in range(self._last + 1):
            whole.put(number, self._total.clone() if number == 0 else self._total.new_zeros(self._total.shape))
        return whole.take()


def norms_are_summed_in_floats(monkeypatch):
    real = candidate.make_reduce_scalars
    monkeypatch.setattr(candidate, "make_reduce_scalars", lambda world, mesh, exact: real(world, mesh))


def sharding_rounds_gradients_as_bf16_parameters_do(monkeypatch):
    def take_grad(param):
        grad, param.grad = param.grad, None
        return grad.bfloat16().float()

    monkeypatch.setattr(sharded, "take_grad", take_grad)


def uses_of_an_embedding_are_one(monkeypatch):
    monkeypatch.setattr(exact.own, "_uses_embedding_twice", lambda model: False)


@pytest.mark.parametrize("row", ["dense/dp3", "dense/dp2.fsdp2 bf16", "moe/fsdp2"])
def test_a_row_has_the_bits_of_one_rank(row):
    result = result_of(row)
    assert result.ok, f"{result.first} {result.why}"
    assert result.num_compared > 100


@pytest.mark.parametrize(
    ("mutant", "row", "at"),
    [
        (gloo_sums, "dense/dp4", "step 1, gradient"),
        (micro_batches_are_one_lane, "dense/dp2", "step 1, gradient"),
        (norms_are_summed_in_floats, "dense/dp4", "step 1, norm"),
        (sharding_rounds_gradients_as_bf16_parameters_do, "dense/fsdp2 bf16", "step 1, gradient"),
        (uses_of_an_embedding_are_one, "tied/pp2", "step 1, gradient of embedding.weight"),
    ],
)
def test_a_mechanism_that_is_off_is_found_where_it_first_shows(mutant, row, at, monkeypatch):
    mutant(monkeypatch)
    result = result_of(row)
    assert not result.ok
    assert words(result.first).startswith(at), words(result.first)


@pytest.mark.slow
@pytest.mark.timeout(2400)
def test_rows_have_the_bits_of_one_rank():
    # tests/train runs most layouts of these models in bf16, from the recipe to the commit.
    in_training = [row for row in EXACT_ROWS if row.name.startswith(("dense", "moe-p")) and row.name.endswith("bf16")]
    rows = [row for row in EXACT_ROWS if row not in in_training]
    assert len(rows) > 90
    # Small products are slow on a core, and two steps tell as much of them as ten do.
    for in_pieces, num_steps in ((False, 10), (True, 2)):
        cases = of_exact_table([row for row in rows if ("pieces" in row.name) == in_pieces]).cases
        results = list(verify_exact(cases, max_ranks=8, num_steps=num_steps))
        assert len(results) == len(cases)
        assert not [(one.case.model, one.case.name, one.failure or one.first) for one in results if not one.ok]


def test_every_row_can_run():
    assert of_exact_table(EXACT_ROWS).refused == ()
    assert len(EXACT_ROWS) == len({row.name for row in EXACT_ROWS})
    assert [row.name for row in select_rows("dense/dp3*", EXACT_ROWS)] == ["dense/dp3", "dense/dp3 bf16"]
