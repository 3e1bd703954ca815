"""Counter-based randomness: a value is a pure function of (seed, stream, element index).

There is no generator state. Element i of a stream is word i % 4 of Philox4x32-10 at counter i // 4, under the seed as
its key; the stream's name is hashed into the counter's upper half. Any slice of a stream therefore equals the same
slice of the whole, on any device and however ranks share it.

Normals come from Box-Muller, z = sqrt(-2 ln u) (cos t, sin t), with the logarithm, sine and cosine as polynomials in
fp32. Only additions, multiplications and square roots are used, which IEEE 754 rounds in one way, and each is its own
elementwise pass, so that no compiler fuses two of them: library functions differ between instruction sets, and between
a vector's body and its tail.

Sources: Salmon et al. 2011, "Parallel Random Numbers: As Easy as 1, 2, 3" (Philox and its constants); Box and Muller
1958; the polynomials are those of Cephes (Moshier), logf.c and sinf.c.
"""

import hashlib

import torch

_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_WEYL_0, _WEYL_1 = 0x9E3779B9, 0xBB67AE85
_WORD = 0xFFFFFFFF
_ROUNDS = 10
_LOG = (
    7.0376836292e-2,
    -1.1514610310e-1,
    1.1676998740e-1,
    -1.2420140846e-1,
    1.4249322787e-1,
    -1.6668057665e-1,
    2.0000714765e-1,
    -2.4999993993e-1,
    3.3333331174e-1,
)
_SIN = (-1.9515295891e-4, 8.3321608736e-3, -1.6666654611e-1)
_COS = (2.443315711809948e-5, -1.388731625493765e-3, 4.166664568298827e-2)
_LN2_HIGH, _LN2_LOW = 0.693359375, -2.12194440e-4  # their sum is ln 2; e * _LN2_HIGH is exact for small e
_SQRT_HALF_BITS = 0x3F3504F3
_CHUNK_WORDS = {"cpu": 1 << 16}  # stays in a core's cache; elsewhere large enough to fill the device
_CHUNK_WORDS_ELSEWHERE = 1 << 24


def philox(
    counter: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], key: tuple[int, int]
) -> torch.Tensor:
    """Philox4x32-10 of each counter.

    Args:
        counter: the four 32-bit words of each counter, least significant first; int64 of one shape [n].
        key: the two 32-bit words of the key.

    Returns:
        The four output words of each counter, int64 [4, n], each in [0, 2**32).

    Source: Salmon et al. 2011, section 3.3; checked against the known answers that Random123 publishes.
    """
    c0, c1, c2, c3 = (word.clone() for word in counter)
    key_0, key_1 = key
    for _ in range(_ROUNDS):
        # int64 products wrap as unsigned ones do, so both halves are right. c1 and c3 may carry garbage above bit 31:
        # it is masked off when they have become multiplicands.
        product_0 = c0.mul_(_MULTIPLIER_0)
        product_1 = c2.mul_(_MULTIPLIER_1)
        next_0 = (product_1 >> 32).bitwise_xor_(c1).bitwise_xor_(key_0).bitwise_and_(_WORD)
        next_2 = (product_0 >> 32).bitwise_xor_(c3).bitwise_xor_(key_1).bitwise_and_(_WORD)
        c0, c1, c2, c3 = next_0, product_1, next_2, product_0
        key_0, key_1 = (key_0 + _WEYL_0) & _WORD, (key_1 + _WEYL_1) & _WORD
    return torch.stack((c0, c1, c2, c3)).bitwise_and_(_WORD)


def stream_number(name: str) -> int:
    """The 64 bits that stand for a stream's name in the counter."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def words(seed: int, stream: str, start: int, count: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """Elements [start, start + count) of a stream of random 32-bit words.

    Args:
        seed: 64-bit seed.
        stream: name of the stream; streams of different names are independent.
        start: index of the first element, in [0, 2**63).
        count: number of elements.
        device: where they are computed.

    Returns:
        int64 [count], each in [0, 2**32).
    """
    out = torch.empty(count, dtype=torch.int64, device=device)
    for offset, part in _chunks(out, start):
        first, lead, num_counters = _span(start + offset, part.numel())
        blocks = _philox_blocks(seed, stream, first, num_counters, out.device)
        part.copy_(blocks.t().reshape(-1)[lead : lead + part.numel()])
    return out


def uniform(seed: int, stream: str, start: int, count: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """Elements [start, start + count) of a stream of uniforms in [0, 1), fp32 multiples of 2**-24; Args as `words`."""
    return (words(seed, stream, start, count, device=device) >> 8).to(torch.float32).mul_(2.0**-24)


def box_words(
    seed: int,
    stream: str,
    shape: tuple[int, ...],
    offsets: tuple[int, ...],
    size: tuple[int, ...],
    *,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """One random 32-bit word for each element of a box of a logical tensor, whoever holds the box.

    The element of row r (all dims but the last, row-major) and column c is element r * W + c of the stream, where W is
    the number of columns rounded up to a multiple of 4: a row begins at a counter, so that a box costs what it holds.

    Args:
        seed: 64-bit seed.
        stream: name of the stream.
        shape: of the logical tensor, at least one dim.
        offsets: where the box starts in it.
        size: of the box.
        device: where they are computed.

    Returns:
        int64 of the box's size, each in [0, 2**32).
    """
    first, lead, num_counters = _span(offsets[-1], size[-1])
    row = torch.zeros((1,) * (len(shape) - 1), dtype=torch.int64, device=device)
    for dim, (offset, extent) in enumerate(zip(offsets[:-1], size[:-1], strict=True)):
        index = torch.arange(offset, offset + extent, dtype=torch.int64, device=device)
        row = row * shape[dim] + index.view(-1, *(1,) * (len(shape) - 2 - dim))
    counters = row.reshape(-1, 1) * -(-shape[-1] // 4) + torch.arange(first, first + num_counters, device=device)
    blocks = _philox_at(seed, stream_number(stream), counters.view(-1)).t().reshape(-1, 4 * num_counters)
    return blocks[:, lead : lead + size[-1]].reshape(size)


def token_halves(seed: int, stream: int, tokens_N: torch.Tensor, width: int) -> torch.Tensor:
    """Random 16-bit numbers for the elements of vectors that belong to numbered tokens.

    Element d of token n is half d % 8 (low halves of the four words first) of the counter n * ceil(width / 8) + d // 8.

    Args:
        seed: 64-bit seed.
        stream: `stream_number` of the stream's name; torch.compile follows no hash.
        tokens_N: int64, the tokens' numbers.
        width: elements of a vector.

    Returns:
        int64 [N, width], each in [0, 2**16).
    """
    num_counters = -(-width // 8)
    within = torch.arange(num_counters, dtype=torch.int64, device=tokens_N.device)
    blocks = _philox_at(seed, stream, (tokens_N[:, None] * num_counters + within).view(-1))
    halves = torch.cat((blocks & 0xFFFF, blocks >> 16))
    return halves.t().reshape(-1, 8 * num_counters)[:, :width]


def normal(seed: int, stream: str, start: int, count: int, *, device: torch.device | str = "cpu") -> torch.Tensor:
    """Elements [start, start + count) of a stream of standard normals, fp32 [count], |z| < 6.8; Args as `words`."""
    return fill_normal_(torch.empty(count, dtype=torch.float32, device=device), seed, stream, start)


def fill_normal_(out: torch.Tensor, seed: int, stream: str, start: int, *, std: float = 1.0) -> torch.Tensor:
    """Writes elements [start, start + out.numel()) of a stream of normals into `out`.

    Args:
        out: contiguous fp32 tensor of any shape, filled in row-major order.
        seed: 64-bit seed.
        stream: name of the stream.
        start: index in the stream of out's first element.
        std: standard deviation.

    Returns:
        out.

    Source: Box and Muller 1958.
    """
    for offset, part in _chunks(out.view(-1), start):
        first, lead, num_counters = _span(start + offset, part.numel())
        z = _box_muller(_philox_blocks(seed, stream, first, num_counters, out.device))
        torch.mul(z.reshape(-1)[lead : lead + part.numel()], std, out=part)
    return out


def _chunks(flat: torch.Tensor, start: int):
    """Cuts a flat tensor into (offset, part) whose ends fall on multiples of the chunk in the stream."""
    size = _CHUNK_WORDS.get(flat.device.type, _CHUNK_WORDS_ELSEWHERE)
    offset = 0
    while offset < flat.numel():
        end = min(flat.numel(), offset + size - (start + offset) % size)
        yield offset, flat[offset:end]
        offset = end


def _span(start: int, count: int) -> tuple[int, int, int]:
    """The first counter that covers [start, start + count), the elements of it to skip, and how many counters."""
    first, lead = divmod(start, 4)
    return first, lead, (lead + count + 3) // 4


def _philox_blocks(seed: int, stream: str, first: int, num_counters: int, device: torch.device) -> torch.Tensor:
    return _philox_at(
        seed, stream_number(stream), torch.arange(first, first + num_counters, dtype=torch.int64, device=device)
    )


def _philox_at(seed: int, stream: int, index: torch.Tensor) -> torch.Tensor:
    """The words [4, n] of these counters of a stream, int64 [n]."""
    upper = (torch.full_like(index, stream & _WORD), torch.full_like(index, stream >> 32))
    return philox((index & _WORD, index >> 32, *upper), (seed & _WORD, seed >> 32 & _WORD))


def _box_muller(blocks_4n: torch.Tensor) -> torch.Tensor:
    """Four normals [n, 4] from the four words [4, n] of each counter: words 0, 1 make two, words 2, 3 the others."""
    u = blocks_4n[0::2].to(torch.float32).mul_(2.0**-32).add_(2.0**-33)  # in (0, 1]
    radius = _log(u).mul_(-2.0).sqrt_()
    direction = blocks_4n[1::2]
    # An angle in [-pi/4, pi/4) from 30 bits; one bit mirrors it at the diagonal and one at the origin: all of the
    # circle.
    theta = (direction & 0x3FFFFFFF).sub_(1 << 29).to(torch.float32).mul_(torch.pi / 2 * 2.0**-30)
    squared = theta * theta
    sine = _polynomial(squared, _SIN).mul_(squared).mul_(theta).add_(theta)
    cosine = _polynomial(squared, _COS).mul_(squared).mul_(squared).sub_(squared.mul_(0.5)).add_(1.0)
    is_swapped = (direction & (1 << 30)) != 0
    radius.mul_((direction >> 31).to(torch.float32).mul_(-2.0).add_(1.0))
    out = torch.empty(blocks_4n.shape[1], 2, 2, dtype=torch.float32, device=blocks_4n.device)
    torch.mul(torch.where(is_swapped, sine, cosine), radius, out=out[:, :, 0].t())
    torch.mul(torch.where(is_swapped, cosine, sine), radius, out=out[:, :, 1].t())
    return out


def _log(u: torch.Tensor) -> torch.Tensor:
    """Natural log of positive normal fp32: u = m 2**e with m in [sqrt(1/2), sqrt(2)), and a polynomial in m - 1."""
    bits = u.view(torch.int32)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    f = (bits - (exponent << 23)).view(torch.float32).sub(1.0)
    e = exponent.to(torch.float32)
    squared = f * f
    result = _polynomial(f, _LOG).mul_(squared).mul_(f)
    return result.add_(e * _LN2_LOW).sub_(squared.mul_(0.5)).add_(f).add_(e.mul_(_LN2_HIGH))


def _polynomial(x: torch.Tensor, coefficients: tuple[float, ...]) -> torch.Tensor:
    result = x * coefficients[0]
    for coefficient in coefficients[1:-1]:
        result.add_(coefficient).mul_(x)
    return result.add_(coefficients[-1])
