"""torch.compile of each block, whole."""

import pytest
import torch
from tests.models.hf_reference import LLAMA, make, random_tokens
from tests.models.moe_reference import with_moe

from drumline.memory import apply_activation_checkpointing
from drumline.models import select
from drumline.recipe.sections import Memory

# Dynamo itself looks at .grad of a block's input; it silences the warning, but not where warnings are errors.
pytestmark = [
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    # Nor is it we who instantiate an autograd function: Dynamo does, to trace it.
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]


def gradients(decoder, starts_BT):
    tokens_BT = random_tokens(2, 65, decoder.shape.vocab_size)
    decoder(tokens_BT[:, :-1], labels_BT=tokens_BT[:, 1:], starts_BT=starts_BT).backward()
    return {name: parameter.grad for name, parameter in decoder.named_parameters()}


def check(kind, checkpointing, backend, model=LLAMA, *, dtype=torch.float32, tolerance=2e-6):
    attend, _ = select(kind, "cpu")
    starts_BT = torch.tensor([[0] * 30 + [30] * 34, [0] * 64], dtype=torch.int32)
    expected = gradients(make(model, attend=attend, compute_dtype=dtype), starts_BT)
    compiled = make(model, attend=attend, compute_dtype=dtype)
    apply_activation_checkpointing(compiled, Memory(activation_checkpointing=checkpointing))
    torch.compiler.reset()
    for block in compiled.layers:
        block.compile(fullgraph=True, backend=backend)
    for name, gradient in gradients(compiled, starts_BT).items():
        assert (gradient - expected[name]).norm() < tolerance * expected[name].norm(), name


@pytest.fixture(params=["sdpa", "kernel"])
def kind(request):
    if request.param == "kernel":
        kernels = pytest.importorskip("drumline.numerics.kernels")
        if kernels.reason():
            pytest.skip(kernels.reason())
    return request.param


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_a_block_is_one_graph_and_has_the_gradients_of_eager(kind, checkpointing):
    check(kind, checkpointing, "aot_eager")


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
@pytest.mark.parametrize("changes", [{"balance": "aux_loss"}, {"capacity_factor": 0.8, "num_shared_experts": 1}])
def test_a_block_with_experts_is_one_graph_too(changes, checkpointing):
    # In bf16 alone, and there as near as two ways to round: a token may even go to another expert.
    check("sdpa", checkpointing, "aot_eager", with_moe(**changes), dtype=torch.bfloat16, tolerance=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", ["none", "selective"])
def test_a_block_compiled_by_inductor_has_the_gradients_of_eager(kind, checkpointing):
    check(kind, checkpointing, "inductor")


def test_dropout_in_a_compiled_block_drops_what_eager_drops():
    model = LLAMA.model_copy(update={"dropout": 0.3})
    places_BT = 7 + torch.arange(128).view(2, 64)
    tokens_BT = random_tokens(2, 65, model.vocab_size)
    losses = []
    for is_compiled in (False, True):
        decoder = make(model)
        torch.compiler.reset()
        for block in decoder.layers if is_compiled else ():
            block.compile(fullgraph=True, backend="aot_eager")
        losses.append(float(decoder(tokens_BT[:, :-1], labels_BT=tokens_BT[:, 1:], places_BT=places_BT).detach()))
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    without = float(make(model)(tokens_BT[:, :-1], labels_BT=tokens_BT[:, 1:]).detach())
    assert losses[0] != pytest.approx(without, rel=1e-4)
