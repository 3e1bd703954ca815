// A 64-bit hash of numbers at their places, as a sum over elements, so that parts of a tensor hash to parts of the sum:
//
//   z = bits(x_i) ^ (i G);  z ^= z >> 32;  z *= M;  hash = sum of (z ^ (z >> 29))      all modulo 2^64
//
// i is the element's index in the whole tensor. Integers only: neither order nor threads change the sum.
#include <cstdint>

namespace {

constexpr uint64_t G = 0x9E3779B97F4A7C15ull, M = 0xD6E8FEB86659FD93ull;

template <class Bits>
uint64_t hash_run(const Bits* x, int64_t count, uint64_t first) {
  uint64_t sum = 0, at = first * G;
  for (int64_t i = 0; i < count; ++i) {
    uint64_t z = static_cast<uint64_t>(x[i]) ^ at;
    at += G;
    z ^= z >> 32;
    z *= M;
    sum += z ^ (z >> 29);
  }
  return sum;
}

template <class Bits>
uint64_t hash_runs(const Bits* x, int64_t length, const int64_t* starts, int64_t runs, int threads) {
  constexpr int64_t PIECE = 1 << 16;
  uint64_t sum = 0;
  if (runs == 1 && length > PIECE) {
    const int64_t pieces = (length + PIECE - 1) / PIECE;
#pragma omp parallel for num_threads(threads) reduction(+ : sum) if (threads > 1)
    for (int64_t piece = 0; piece < pieces; ++piece) {
      const int64_t at = piece * PIECE, left = length - at;
      sum += hash_run(x + at, left < PIECE ? left : PIECE, static_cast<uint64_t>(starts[0] + at));
    }
    return sum;
  }
  // One thread never enters OpenMP, whose pool does not survive a fork.
#pragma omp parallel for num_threads(threads) reduction(+ : sum) if (threads > 1 && runs > 1)
  for (int64_t run = 0; run < runs; ++run) sum += hash_run(x + run * length, length, static_cast<uint64_t>(starts[run]));
  return sum;
}

}  // namespace

// `runs` runs of `length` elements of `size` bytes, one behind the other; run r begins at index starts[r] of the whole tensor.
extern "C" uint64_t drumline_hash(const void* x, int size, int64_t length, const int64_t* starts, int64_t runs, int threads) {
  switch (size) {
    case 1: return hash_runs(static_cast<const uint8_t*>(x), length, starts, runs, threads);
    case 2: return hash_runs(static_cast<const uint16_t*>(x), length, starts, runs, threads);
    case 4: return hash_runs(static_cast<const uint32_t*>(x), length, starts, runs, threads);
    default: return hash_runs(static_cast<const uint64_t*>(x), length, starts, runs, threads);
  }
}
