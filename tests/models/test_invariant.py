"""A decoder of invariant operators: the same function as the ordinary one, with bits that no neighbour moves."""

import pytest
import torch

from drumline import models
from drumline.numerics.invariant import NotInvariantError, classify, strict
from drumline.recipe.sections import Model

SHAPE = Model(num_layers=2, dim=48, num_heads=4, num_kv_heads=2, head_dim=12, hidden_dim=80, vocab_size=101)


def decoder(dtype, chunk_tokens=64, is_invariant=True):
    built = models.build(
        SHAPE,
        compute_dtype=dtype,
        attend=models.InvariantAttend() if is_invariant else None,
        cross_entropy=models.invariant_cross_entropy(chunk_tokens) if is_invariant else None,
        device="cpu",
    )
    models.initialize(built, seed=0)
    return models.make_invariant(built) if is_invariant else built


def batch(num_rows=3, num_tokens=70):
    tokens = torch.randint(0, 101, (num_rows, num_tokens + 1), generator=torch.Generator().manual_seed(0))
    labels = tokens[:, 1:].clone()
    labels[:, 3::7] = -100
    return tokens[:, :-1], labels


def gradients(model, tokens, labels):
    loss = model(tokens, labels_BT=labels)
    loss.backward()
    return loss.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_it_computes_what_the_ordinary_decoder_computes(dtype):
    loss, own = gradients(decoder(dtype), *batch())
    expected_loss, expected = gradients(decoder(dtype, is_invariant=False), *batch())
    tolerance = {torch.float32: 1e-4, torch.bfloat16: 6e-2}[dtype]
    torch.testing.assert_close(loss, expected_loss, rtol=tolerance, atol=0.0)
    assert own.keys() == expected.keys()
    for name, want in expected.items():
        assert (own[name] - want).norm() <= tolerance * want.norm(), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_sequences_logits_have_the_same_bits_alone_and_among_others_and_without_what_follows(dtype):
    model, (tokens, _) = decoder(dtype), batch()
    with torch.no_grad():
        whole = model(tokens)
        for row in range(3):
            assert torch.equal(model(tokens[row : row + 1])[0], whole[row])
        for length in (1, 33, 64, 69):
            assert torch.equal(model(tokens[:, :length]), whole[:, :length])


def test_neither_threads_nor_loss_chunks_move_losses_or_gradients():
    results = []
    before = torch.get_num_threads()
    for threads, chunk in ((1, 64), (2, 64), (1, 1000), (1, 7)):
        torch.set_num_threads(threads)
        results.append(gradients(decoder(torch.float32, chunk), *batch()))
    torch.set_num_threads(before)
    for loss, grads in results[1:]:
        assert torch.equal(loss, results[0][0])
        assert all(torch.equal(grad, results[0][1][name]) for name, grad in grads.items())


def test_it_runs_in_strict_mode_forward_and_backward_where_the_ordinary_one_does_not():
    own, ordinary = decoder(torch.float32), decoder(torch.float32, is_invariant=False)
    tokens, labels = batch()
    with strict(also=models.TABLES) as mode:
        gradients(own, tokens, labels)
    assert {name for name in mode.seen if classify(name).kind == "unknown"} == set(models.TABLES)
    with strict(also=models.TABLES), pytest.raises(NotInvariantError):
        gradients(ordinary, tokens, labels)
