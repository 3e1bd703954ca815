"""What ranks hold under tensor parallelism: initial weights, copies after steps, and what a block keeps."""

import pytest
import torch
from tests.parallel.tensor.comparison import APART, ASYNC, EXPERTS, TIED, TOKENS, assembled, own_batch, same_along_tp
from tests.ranks import ranks

from drumline import models
from drumline.models.rope import tables
from drumline.parallel import held
from drumline.train.step import train_step


def box(part):
    return tuple(slice(a, a + n) for a, n in zip(part.offsets, part.tensor.shape, strict=True))


@pytest.mark.parametrize("kind", [TIED, EXPERTS], ids=["tied", "experts"])
@ranks(4)
def test_initial_weights_are_those_of_one_device_bit_for_bit(kind):
    made = assembled(*kind, "layout.tp=4")
    whole = models.build(made.model.shape, device="cpu")
    models.initialize(whole, seed=0)
    for name, expected in whole.named_parameters():
        part = held(made.parameters[name], made.places[name])
        assert torch.equal(part.tensor, expected[box(part)]), name


@pytest.mark.parametrize("way", [(), APART, ASYNC], ids=["sequence", "apart", "async"])
@pytest.mark.parametrize("fsdp", [1, 2])
def test_copies_stay_equal_bit_for_bit_and_padding_zero(fsdp, way):
    @ranks(2 * fsdp)
    def check():
        made = assembled(*EXPERTS, *way, "layout.tp=2", f"layout.fsdp={fsdp}")
        before = {name: param.detach().clone() for name, param in made.parameters.items()}
        for _ in range(5):
            train_step(
                [own_batch(made)],
                100,
                1e-2,
                passes=made.passes,
                gradients=made.gradients,
                optimizer=made.optimizer,
                max_grad_norm=1.0,
                reduce_scalars=lambda loss, squares: (float(loss), 1.0),
                check_finite=lambda result, batches: None,
            )
        for name, param in made.parameters.items():
            place = made.places[name]
            part = held(param, place)
            assert not torch.equal(part.tensor, held(before[name], place).tensor) or not part.tensor.numel(), name
            if "tp" in place.copied:
                assert same_along_tp(part.tensor, made.mesh), name
                for moment in ("exp_avg", "exp_avg_sq"):
                    state = held(made.optimizer.state[param][moment], place).tensor
                    assert same_along_tp(state, made.mesh), name
            local = param.to_local() if hasattr(param, "to_local") else param
            assert local[part.tensor.shape[0] :].count_nonzero() == 0, name

    check()


def kept_bytes(made):
    """Bytes that one block keeps for its backward, parameters apart."""
    params = {p.untyped_storage().data_ptr() for p in made.model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in params:
            kept[storage.data_ptr()] = (storage.nbytes(), tensor)
        return tensor

    rows, width, tp = 2, made.model.shape.dim, made.mesh.layout.tp
    shared = tp > 1 and made.mesh.layout.sequence_parallel
    x = torch.randn(rows, TOKENS // tp if shared else TOKENS, width, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = made.model.layers[0](x, tables(made.model.shape, TOKENS, "cpu"))
    assert out.shape == x.shape
    return sum(num_bytes for num_bytes, _ in kept.values())


@pytest.mark.parametrize("way", [(), ASYNC], ids=["sequence", "async"])
@ranks(4)
def test_a_block_keeps_no_more_than_its_share_of_what_one_device_keeps(way):
    one, shared, apart = (kept_bytes(assembled(*keys)) for keys in ((), (*way, "layout.tp=4"), (*APART, "layout.tp=4")))
    rope_and_masks = 4096
    assert shared <= one / 4 + rope_and_masks
    assert apart > 1.5 * shared
