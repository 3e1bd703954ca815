"""Strict mode lets through what is known, and says of the rest what would work."""

import pytest
import torch
import torch.nn.functional as F

from drumline.numerics import invariant
from drumline.numerics.invariant import NotInvariantError, classify, strict


def test_an_operator_of_class_unknown_is_refused_by_name_with_what_works():
    x = torch.randn(4, 8)
    with strict(), pytest.raises(NotInvariantError, match=r"aten\.mm.*\n.*invariant\.matmul"):
        x @ x.t()


@pytest.mark.parametrize(
    "call",
    [
        lambda x: F.softmax(x, -1),
        lambda x: x.sum(),
        lambda x: F.silu(x),
        lambda x: torch.add(x, x, alpha=2),
        lambda x: torch.special.bessel_j0(x),
    ],
    ids=["softmax", "sum", "silu", "add-alpha", "not-in-the-table"],
)
def test_floating_operators_outside_the_table_are_refused(call):
    with strict(), pytest.raises(NotInvariantError, match="what works"):
        call(torch.randn(4, 8))


def test_a_backward_is_held_to_the_same_rule():
    x = torch.randn(4, 8, requires_grad=True)
    y = F.silu(x)
    with strict(), pytest.raises(NotInvariantError, match="silu_backward"):
        y.backward(torch.ones_like(y))


def test_integers_pass_since_they_round_nothing():
    with strict():
        assert torch.arange(10).sum() == 45


def test_own_operators_run_forward_and_backward():
    x = torch.randn(6, 32, requires_grad=True)
    weight, tokens = torch.ones(32, requires_grad=True), torch.tensor([1, 2, 1, 0, 2, 1])
    table = torch.randn(3, 32, requires_grad=True)
    with strict() as mode:
        y = invariant.rms_norm(x + invariant.embedding(tokens, table), weight, 1e-5)
        y = invariant.swiglu(y, invariant.softmax(x)) * invariant.log_softmax(x)
        loss = invariant.sum(invariant.cross_entropy(y, tokens)) + invariant.mean(y)
        loss.backward()
    assert {classify(name).kind for name in mode.seen} == {"constructive"}
    assert table.grad is not None


def test_in_place_forms_have_the_class_of_the_others():
    assert classify("aten::add_") == classify("aten::add")
    assert classify("aten::mm").kind == "unknown"


def test_every_own_operator_is_in_the_table():
    own = {name for name in torch._C._dispatch_get_all_op_names() if name.startswith("drumline::invariant_")}
    assert own
    assert {name for name in own if classify(name).kind != "constructive"} == set()
