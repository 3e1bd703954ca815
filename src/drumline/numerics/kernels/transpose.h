// Transposing squares of 32-bit lanes in registers, and copying rows by it.
#pragma once

#include <utility>

#include "simd.h"

#ifndef __has_builtin
#define __has_builtin(x) 0
#endif

namespace {

#if __has_builtin(__builtin_shufflevector)
// Exchanges the off-diagonal H x H blocks of a pair of rows that are H apart.
template <int H, size_t... J>
INLINE void exchange_blocks(uvec& a, uvec& b, std::index_sequence<J...>) {
  const uvec low = __builtin_shufflevector(a, b, (J & H ? LANES + int(J) - H : int(J))...);
  b = __builtin_shufflevector(a, b, (J & H ? LANES + int(J) : int(J) + H)...);
  a = low;
}
template <int H>
INLINE void exchange_rows(uvec* rows) {
#pragma GCC unroll 16
  for (int i = 0; i < LANES; ++i)
    if (!(i & H)) exchange_blocks<H>(rows[i], rows[i + H], std::make_index_sequence<LANES>());
}
INLINE void transpose_square(uvec* rows) {
  if constexpr (LANES >= 16) exchange_rows<8>(rows);
  if constexpr (LANES >= 8) exchange_rows<4>(rows);
  exchange_rows<2>(rows);
  exchange_rows<1>(rows);
}
#else
INLINE void transpose_square(uvec* rows) {
  for (int i = 0; i < LANES; ++i)
    for (int j = 0; j < i; ++j) {
      const uint32_t x = rows[i][j];
      rows[i][j] = rows[j][i];
      rows[j][i] = x;
    }
}
#endif

INLINE uvec bits_of(vec v) {
  uvec u;
  std::memcpy(&u, &v, sizeof u);
  return u;
}
INLINE vec floats_of(uvec u) {
  vec v;
  std::memcpy(&v, &u, sizeof v);
  return v;
}

// to[j][i] = from[i][j] for i < rows <= LANES and j < columns <= LANES; columns of `to` past `rows` become zero up to LANES
// if `pads`.
template <class From, class To>
INLINE void transpose_block(const From* from, long from_ld, To* to, long to_ld, int rows, int columns, bool pads) {
  uvec square[LANES];
  for (int i = 0; i < LANES; ++i) square[i] = i < rows ? bits_of(load_lanes(from + i * from_ld, columns)) : uvec{};
  transpose_square(square);
  for (int j = 0; j < columns; ++j) store_lanes(to + j * to_ld, floats_of(square[j]), pads ? LANES : rows);
}

}  // namespace
