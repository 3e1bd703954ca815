import pytest
import torch
from torch import nn

from drumline.optimizers import build_adamw, clip, local_sum_of_squares, materialize_states
from drumline.parallel.place import whole_places
from drumline.recipe.sections import Optimizer


def model():
    torch_generator = torch.Generator().manual_seed(0)
    module = nn.Sequential(
        nn.Linear(5, 7, bias=False), nn.LayerNorm(7, bias=False), nn.Linear(7, 3, bias=False)
    ).double()
    for param in module.parameters():
        param.data = torch.randn(param.shape, generator=torch_generator, dtype=torch.float64)
        param.grad = torch.randn(param.shape, generator=torch_generator, dtype=torch.float64)
    return module


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_two_steps_match_the_published_algorithm(implementation):
    module, section = model(), Optimizer(lr=0.1, weight_decay=0.3, implementation=implementation)
    expected = []
    for param in module.parameters():
        decay = 0.3 if param.ndim >= 2 else 0.0
        theta, m, v = param.detach().clone(), 0.0, 0.0
        for t in (1, 2):
            m = 0.9 * m + 0.1 * param.grad
            v = 0.95 * v + 0.05 * param.grad**2
            theta = theta - 0.1 * decay * theta - 0.1 * (m / (1 - 0.9**t)) / ((v / (1 - 0.95**t)).sqrt() + 1e-8)
        expected.append(theta)
    optimizer = build_adamw(module, section, whole_places(module), 0)
    optimizer.step()
    optimizer.step()
    for param, theta in zip(module.parameters(), expected, strict=True):
        torch.testing.assert_close(param.detach(), theta, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_states_made_for_a_checkpoint_equal_those_that_torch_makes(implementation):
    ours, torchs = model(), model()
    made = build_adamw(ours, Optimizer(implementation=implementation), whole_places(ours), 0)
    lazy = build_adamw(torchs, Optimizer(implementation=implementation), whole_places(torchs), 0)
    materialize_states(made, 0)
    made.step()
    lazy.step()
    for a, b in zip(ours.parameters(), torchs.parameters(), strict=True):
        assert torch.equal(a, b)
        assert {k: v.dtype for k, v in made.state[a].items()} == {k: v.dtype for k, v in lazy.state[b].items()}


def test_clipping_matches_torch():
    ours, torchs = model(), model()
    grads = [p.grad for p in ours.parameters()]
    norm = float(local_sum_of_squares(grads)) ** 0.5
    clip(grads, norm, 1.0)
    expected = torch.nn.utils.clip_grad_norm_(torchs.parameters(), 1.0)
    assert norm == pytest.approx(float(expected), rel=1e-12)
    for a, b in zip(ours.parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-5, atol=1e-7)


def test_clipping_leaves_small_gradients_and_zero_means_never():
    grads = [torch.tensor([3.0, 4.0])]
    clip(grads, 5.0, 6.0)
    clip(grads, 5.0, 0.0)
    assert grads[0].tolist() == [3.0, 4.0]


def test_a_rank_without_gradients_clips_none_though_the_norm_of_all_ranks_is_too_large():
    clip([], 5.0, 1.0)
    clip(iter(()), 5.0, 1.0)
    assert float(local_sum_of_squares([])) == 0.0


def test_the_norm_of_a_long_flat_gradient_keeps_its_digits():
    grad = torch.randn(6_000_000, generator=torch.Generator().manual_seed(0))
    expected = float(grad.double().square().sum())
    assert float(local_sum_of_squares([grad])) == pytest.approx(expected, rel=1e-6)


def after_five_steps(cut, implementation, exact):
    draw = torch.Generator().manual_seed(0)
    weights = torch.randn(1003, generator=draw)
    grads = [torch.randn(1003, generator=draw) * 10.0**-step for step in range(5)]
    pieces = nn.ParameterList([nn.Parameter(piece.clone()) for piece in weights.split(cut)])
    section = Optimizer(lr=0.01, implementation=implementation)
    optimizer = build_adamw(pieces, section, whole_places(pieces), 0, exact=exact)
    for grad in grads:
        for piece, part in zip(pieces, grad.split(cut), strict=True):
            piece.grad = part.clone()
        optimizer.step()
    return torch.cat([piece.detach() for piece in pieces])


@pytest.mark.parametrize("cut", [1, 3, 17, 31, 33, 100, 1001])
def test_in_exact_mode_no_element_depends_on_where_its_tensor_is_cut(cut):
    whole = after_five_steps(1003, "auto", exact=True)
    assert torch.equal(after_five_steps(cut, "auto", exact=True), whole)


@pytest.mark.skipif(torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="vectors of that width")
def test_the_fused_step_does_depend_on_it():
    assert not torch.equal(after_five_steps(3, "auto", exact=False), after_five_steps(1003, "auto", exact=False))


@pytest.mark.parametrize("cuts", [(1, 17, 18, 700), (500,)], ids=str)
def test_the_step_of_exact_mode_has_the_same_bits_however_a_tensor_is_cut(cuts):
    def moved(parts):
        module = nn.ParameterList([nn.Parameter(part[0].clone()) for part in parts])
        optimizer = build_adamw(module, Optimizer(lr=0.01), whole_places(module), 0, exact=True)
        for _ in range(2):
            for param, (_, grad) in zip(module, parts, strict=True):
                param.grad = grad.clone()
            optimizer.step()
        states = [optimizer.state[param] for param in module]
        found = [
            [param.detach() for param in module],
            *([each[key] for each in states] for key in ("exp_avg", "exp_avg_sq")),
        ]
        return [torch.cat(each) for each in found]

    both = torch.randn(2, 1003, generator=torch.Generator().manual_seed(0))
    whole, parts = moved([both]), moved(both.tensor_split(cuts, dim=1))
    for a, b in zip(whole, parts, strict=True):
        assert torch.equal(a, b)


def test_the_step_of_exact_mode_is_that_of_torch():
    ours, torchs = (model().float() for _ in range(2))
    section = Optimizer(lr=0.1, weight_decay=0.3)
    optimizers = [build_adamw(each, section, whole_places(each), 0, exact=each is ours) for each in (ours, torchs)]
    for _ in range(3):
        for module, optimizer in zip((ours, torchs), optimizers, strict=True):
            for number, param in enumerate(module.parameters()):
                param.grad = torch.randn(param.shape, generator=torch.Generator().manual_seed(number))
            optimizer.step()
    for a, b in zip(ours.parameters(), torchs.parameters(), strict=True):
        torch.testing.assert_close(a, b)
    states = [optimizer.state_dict()["state"][0] for optimizer in optimizers]
    assert {k: v.dtype for k, v in states[0].items()} == {k: v.dtype for k, v in states[1].items()}
