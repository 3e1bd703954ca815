import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drumline.optimizers import learning_rate
from drumline.recipe.sections import Schedule

WSD = Schedule(kind="wsd", warmup_steps=10, decay_fraction=0.2, min_lr_ratio=0.1)


def rates(schedule, num_steps=100):
    return [learning_rate(step, peak=2.0, num_steps=num_steps, schedule=schedule) for step in range(num_steps)]


def test_warm_up_is_linear_and_never_zero():
    assert rates(WSD)[:10] == pytest.approx([0.2 * (i + 1) for i in range(10)])


def test_wsd_is_stable_until_its_decay_and_would_reach_the_floor_one_step_past_the_last():
    found = rates(WSD)
    assert set(found[10:80]) == {2.0}
    steps = [a - b for a, b in itertools.pairwise(found[79:])]
    assert steps == pytest.approx([1.8 / 21] * 20)
    assert found[-1] - steps[-1] == pytest.approx(0.2)


def test_cosine_matches_torch():
    torch = pytest.importorskip("torch")
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=2.0)
    reference = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=100, eta_min=0.2)
    found = rates(Schedule(kind="cosine", warmup_steps=0, min_lr_ratio=0.1))
    for step in range(100):
        assert found[step] == pytest.approx(reference.get_last_lr()[0], rel=1e-9)
        optimizer.step()
        reference.step()


@given(
    st.sampled_from(["wsd", "cosine", "constant"]),
    st.integers(0, 50),
    st.floats(0, 1),
    st.floats(0, 1),
    st.integers(1, 200),
)
def test_a_rate_is_always_between_zero_and_the_peak(kind, warmup, decay, floor, num_steps):
    schedule = Schedule(kind=kind, warmup_steps=warmup, decay_fraction=decay, min_lr_ratio=floor)
    for step in range(num_steps):
        rate = learning_rate(step, peak=1.0, num_steps=num_steps, schedule=schedule)
        assert math.isfinite(rate)
        assert 0.0 <= rate <= 1.0 + 1e-12
