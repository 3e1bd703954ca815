import torch

from drumline.numerics.random import box_words, token_halves, words
from drumline.numerics.rounding import round_stochastically


def test_both_neighbours_are_taken_as_often_as_the_value_lies_near_them():
    # Between 1 and 1 + 2**-7, the next bf16, a quarter of the way.
    x = torch.full((1 << 16,), 1.0 + 2.0**-9)
    rounded = round_stochastically(x, torch.arange(1 << 16)).double()
    assert rounded.unique().tolist() == [1.0, 1.0 + 2.0**-7]
    assert rounded.mean().item() == 1.0 + 2.0**-9


def test_every_value_is_right_on_average_over_all_random_numbers():
    x = torch.tensor([3.1415927, -2.7182817, 1e-30, -7.7e12, 0.0, 6.1e-5])
    halves = torch.arange(1 << 16)[:, None].expand(-1, len(x))
    mean = round_stochastically(x.expand(1 << 16, -1).contiguous(), halves).double().mean(0)
    torch.testing.assert_close(mean, x.double(), rtol=1e-14, atol=0.0)


def test_what_bf16_holds_and_what_is_not_finite_stays():
    held = torch.tensor([1.0, -0.0, 2.0**-126, 3.38953139e38, float("inf"), float("-inf")])
    rounded = round_stochastically(held, torch.full((6,), 0xFFFF))
    assert torch.equal(rounded.float().view(torch.int32), held.view(torch.int32))
    assert round_stochastically(torch.tensor([float("nan")]), torch.tensor([0xFFFF])).isnan().all()


def test_a_box_holds_the_words_that_the_whole_tensor_has_there():
    shape = (3, 5, 10)
    whole = box_words(7, "s", shape, (0, 0, 0), shape)
    assert len(whole.unique()) == whole.numel()
    for offsets, size in (
        ((0, 0, 0), (3, 5, 10)),
        ((1, 2, 3), (2, 3, 5)),
        ((2, 4, 9), (1, 1, 1)),
        ((0, 1, 4), (3, 2, 4)),
    ):
        box = box_words(7, "s", shape, offsets, size)
        assert torch.equal(box, whole[tuple(slice(o, o + s) for o, s in zip(offsets, size, strict=True))])


def test_the_words_of_a_box_are_those_of_the_stream():
    assert torch.equal(box_words(7, "s", (9,), (0,), (9,)), words(7, "s", 0, 9))
    # A row begins at a counter: 5 columns take 8 elements of the stream.
    assert torch.equal(box_words(7, "s", (3, 5), (2, 0), (1, 5))[0], words(7, "s", 16, 5))


def test_a_tokens_halves_do_not_depend_on_its_neighbours_and_are_those_of_the_stream():
    tokens = torch.tensor([5, 0, 1 << 40])
    found = token_halves(3, 99, tokens, 19)
    assert torch.equal(found[2:], token_halves(3, 99, tokens[2:], 19))
    from drumline.numerics.random import stream_number

    drawn = words(3, "s", 5 * 3 * 4, 12).view(3, 4)  # three counters hold 19 halves
    expected = torch.cat((drawn & 0xFFFF, drawn >> 16), dim=1).flatten()[:19]
    assert torch.equal(token_halves(3, stream_number("s"), torch.tensor([5]), 19)[0], expected)
