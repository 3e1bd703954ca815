"""Activation checkpointing: the same bits, fewer bytes, the same names."""

import collections
import copy

import pytest
import torch
from tests.models.hf_reference import LLAMA, QWEN, make, random_tokens
from tests.ranks import ranks
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.utils._python_dispatch import TorchDispatchMode

from drumline.memory import AliveBytes, apply_activation_checkpointing
from drumline.models import build, initialize
from drumline.numerics import kernels
from drumline.parallel.place import holder, whole_places
from drumline.recipe.sections import Memory

KINDS = ("none", "full", "every_n", "selective")
DEEP = LLAMA.model_copy(update={"num_layers": 4})


def decoder_with(kind, model=DEEP, compute_dtype=torch.float32):
    decoder = make(model, compute_dtype=compute_dtype)
    apply_activation_checkpointing(decoder, Memory(activation_checkpointing=kind, every_n=2))
    return decoder


def run(decoder, starts_BT=None):
    """Loss and, by name, gradients."""
    tokens_BT = random_tokens(2, 65, decoder.shape.vocab_size)
    loss = decoder(tokens_BT[:, :-1], labels_BT=tokens_BT[:, 1:], starts_BT=starts_BT)
    loss.backward()
    return loss, {name: parameter.grad for name, parameter in decoder.named_parameters()}


@pytest.mark.parametrize("compute_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS[1:])
@pytest.mark.parametrize("model", [DEEP, QWEN], ids=["llama3", "qwen3"])
def test_loss_and_gradients_have_the_bits_of_no_checkpointing(kind, compute_dtype, model):
    starts_BT = torch.tensor([[0] * 30 + [30] * 34, [0] * 64], dtype=torch.int32)
    loss, gradients = run(decoder_with(kind, model, compute_dtype), starts_BT)
    plain_loss, plain_gradients = run(decoder_with("none", model, compute_dtype), starts_BT)
    assert torch.equal(loss, plain_loss)
    for name, gradient in gradients.items():
        assert torch.equal(gradient, plain_gradients[name]), name


def bytes_kept(kind, model=DEEP):
    """Bytes that are alive between forward and backward, weights apart."""
    decoder = decoder_with(kind, model)
    tokens_BT = random_tokens(2, 65, model.vocab_size)
    with AliveBytes() as alive:
        loss = decoder(tokens_BT[:, :-1], labels_BT=tokens_BT[:, 1:])
        return alive.now(apart_from=(*decoder.parameters(), loss))


def test_kept_bytes_fall_from_none_over_selective_and_every_n_to_full():
    num_bytes = {kind: bytes_kept(kind) for kind in KINDS}
    assert num_bytes["full"] < num_bytes["every_n"] < num_bytes["none"]
    assert num_bytes["full"] < num_bytes["selective"] < num_bytes["none"]
    half_of_the_saving = (num_bytes["none"] - num_bytes["full"]) / 2
    assert num_bytes["every_n"] - num_bytes["full"] == pytest.approx(half_of_the_saving, rel=0.02)


@pytest.mark.parametrize("with_kernels", [False, True], ids=["torch", "own kernels"])
@pytest.mark.parametrize("kind", ["none", "selective", "full"])
def test_kept_bytes_of_a_block_are_those_of_the_formula(kind, with_kernels, monkeypatch):
    if not with_kernels:
        monkeypatch.setattr("drumline.numerics.kernels.take", lambda *tensors: False)
    D, F, H = DEEP.dim, DEEP.hidden_dim, DEEP.num_heads
    heads = 2 * (H + DEEP.num_kv_heads) * DEEP.head_dim
    elements = {"none": 4 * D + heads + 3 * F + H + 2, "selective": 3 * D + heads + 2 * F + H, "full": D}
    deeper = DEEP.model_copy(update={"num_layers": DEEP.num_layers + 2})
    assert bytes_kept(kind, deeper) - bytes_kept(kind) == 2 * elements[kind] * 4 * (2 * 64)


class CountOperators(TorchDispatchMode):
    """How often each operator ran."""

    def __init__(self):
        super().__init__()
        self.counts = collections.Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))


def test_selective_computes_no_matmul_and_no_attention_twice():
    counts = {}
    for kind in ("none", "selective", "full"):
        with CountOperators() as counted:
            run(decoder_with(kind))
        counts[kind] = counted.counts
    attention = "aten._scaled_dot_product_flash_attention_for_cpu.default"
    assert counts["selective"]["aten.mm.default"] == counts["none"]["aten.mm.default"]
    assert counts["selective"][attention] == counts["none"][attention] == DEEP.num_layers
    assert counts["full"][attention] == 2 * DEEP.num_layers
    # Six of a block's seven matmuls: recomputing stops before the last, whose result nothing needs.
    assert counts["full"]["aten.mm.default"] == counts["none"]["aten.mm.default"] + 6 * DEEP.num_layers
    swiglu = "drumline.swiglu.default" if kernels.available() else "aten.silu.default"
    assert counts["selective"][swiglu] == 2 * DEEP.num_layers


@pytest.mark.parametrize("kind", KINDS)
def test_sharded_blocks_recompute_with_the_same_bits(kind):
    @ranks(2)
    def body():
        def gradients(kind):
            decoder = build(DEEP, compute_dtype=torch.bfloat16)
            apply_activation_checkpointing(decoder, Memory(activation_checkpointing=kind))
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, cast_forward_inputs=False)
            for block in decoder.layers:
                fully_shard(block, mp_policy=policy)
            fully_shard(decoder, mp_policy=policy)
            for module in decoder.modules():
                if isinstance(module, FSDPModule):
                    module.set_gradient_divide_factor(1.0)
                    module.set_force_sum_reduction_for_comms(True)
            decoder.to_empty(device="cpu")
            initialize(decoder, 0, holder(whole_places(decoder)))
            return run(decoder)[1]

        expected = gradients("none")
        for name, gradient in gradients(kind).items():
            assert torch.equal(gradient.to_local(), expected[name].to_local()), name

    body()


@pytest.mark.parametrize("kind", KINDS)
def test_names_of_parameters_and_modules_stay(kind):
    decoder, plain = decoder_with(kind), decoder_with("none")
    assert [name for name, _ in decoder.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert [name for name, _ in decoder.named_modules()] == [name for name, _ in plain.named_modules()]


def test_a_copy_of_a_checkpointed_model_computes_with_its_own_weights():
    decoder = decoder_with("full")
    twin = copy.deepcopy(decoder)
    with torch.no_grad():
        for parameter in decoder.parameters():
            parameter.zero_()
    _, gradients = run(twin)
    _, expected = run(decoder_with("none"))
    assert all(torch.equal(gradients[name], expected[name]) for name in expected)
