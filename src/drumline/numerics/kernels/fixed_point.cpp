// Sums of whole numbers that numbers are cut into, as drumline.numerics.exact_sum defines them:
//
//   y = x scale (or its square) 2^WIDTH,   high = sum of floor(y),   low = sum of floor((y - floor(y)) 2^WIDTH)
//
// In fp64 all steps but the last floor are exact, and so few numbers are summed there before they become integers that no sum
// rounds: neither order nor threads change a bit.
#include <cstdint>

#include "simd.h"

namespace {

constexpr int64_t PIECE = 1 << 14;

constexpr int WIDE = LANES / 2;  // numbers of fp64 in a vector
typedef double dvec __attribute__((vector_size(WIDE * 8)));
typedef float half_vec __attribute__((vector_size(WIDE * 4)));

// The next whole number below, of |y| < 2^51: the sum with 1.5 * 2^52 rounds to the nearest.
INLINE dvec floor_of(dvec y) {
  const dvec magic = 6755399441055744.0 - dvec{}, nearest = (y + magic) - magic;
  return nearest > y ? nearest - 1.0 : nearest;
}

INLINE dvec load_wide(const float* x) { return __builtin_convertvector(load_as<half_vec>(x), dvec); }
INLINE dvec load_wide(const bf16* x) {
  float wide[WIDE];
  for (int lane = 0; lane < WIDE; ++lane) wide[lane] = to_float(x[lane]);
  return load_wide(wide);
}

template <class Element>
void sum_piece(const Element* x, int64_t count, double scale, double unit, bool squared, int64_t* high, int64_t* low) {
  constexpr int WAYS = 4;  // sums at a time, so that additions need not wait for each other
  dvec whole[WAYS] = {}, rest[WAYS] = {};
  auto add = [&](const Element* at, int way) {
    dvec y = load_wide(at) * scale;
    if (squared) y *= y;
    y *= unit;
    const dvec floored = floor_of(y);
    whole[way] += floored;
    rest[way] += floor_of((y - floored) * unit);
  };
  int64_t i = 0;
  for (; i + WAYS * WIDE <= count; i += WAYS * WIDE)
    for (int way = 0; way < WAYS; ++way) add(x + i + way * WIDE, way);
  for (; i < count; i += WIDE) {
    Element last[WIDE] = {};
    std::memcpy(last, x + i, sizeof(Element) * (count - i < WIDE ? count - i : WIDE));
    add(last, 0);
  }
  for (int way = 0; way < WAYS; ++way)
    for (int lane = 0; lane < WIDE; ++lane) *high += int64_t(whole[way][lane]), *low += int64_t(rest[way][lane]);
}

template <class Element>
void sum(const Element* x, int64_t count, double scale, double unit, bool squared, int threads, int64_t* words) {
  int64_t high = 0, low = 0;
  const int64_t pieces = (count + PIECE - 1) / PIECE;
  // One thread never enters OpenMP, whose pool does not survive a fork.
#pragma omp parallel for num_threads(threads) reduction(+ : high, low) if (threads > 1 && pieces > 1)
  for (int64_t piece = 0; piece < pieces; ++piece) {
    int64_t of_piece[2] = {};
    const int64_t first = piece * PIECE, left = count - first;
    sum_piece(x + first, left < PIECE ? left : PIECE, scale, unit, squared, of_piece, of_piece + 1);
    high += of_piece[0], low += of_piece[1];
  }
  words[0] = high, words[1] = low;
}

}  // namespace

extern "C" void drumline_fixed_point(const void* x, int64_t count, double scale, double unit, int squared, int is_bf16, int threads,
                                     int64_t* words) {
  if (is_bf16)
    sum(static_cast<const bf16*>(x), count, scale, unit, squared, threads, words);
  else
    sum(static_cast<const float*>(x), count, scale, unit, squared, threads, words);
}
