// Products for any CPU: fp32 arithmetic on the vectors of simd.h, one fused multiply-add a product.
#pragma once

#include "transpose.h"

namespace {

constexpr long PANEL = 2 * LANES;  // lanes that are computed together

inline long smaller(long a, long b) { return a < b ? a : b; }
inline long round_to(long n, long unit) { return (n + unit - 1) / unit * unit; }
inline int left(long n) { return int(n < LANES ? n : LANES); }

// A matrix of `count` rows by k.
template <class Element_>
struct Side {
  using Element = Element_;
  const Element* at;
  long count, row_stride, k_stride;
};

template <class Element_>
struct Portable {
  using Element = Element_;
  static constexpr long ROWS = LANES == 16 ? 14 : 6, SMALLEST = 1, STEPS = 256;
  static constexpr double CYCLES = 0.5 / LANES;
  static constexpr long ROW_LD = STEPS + LANES;  // no power of two, so that a group's rows do not share cache sets
  static constexpr long GROUP = ROWS * ROW_LD > STEPS * LANES ? ROWS * ROW_LD : STEPS * LANES;
  static constexpr long BYTES_OF_LANES = 4 * PANEL * STEPS, BYTES_OF_ROWS = 4 * GROUP;
  static void enter() {}
  static void leave() {}

  // Panels of [k][PANEL].
  static void pack_lanes(const Side<Element>& side, long first, long count, long k0, long steps, char* to) {
    float* panels = reinterpret_cast<float*>(to);
    const Element* from = side.at + first * side.row_stride + k0 * side.k_stride;
    auto place = [&](long lane) { return panels + lane / PANEL * (PANEL * STEPS) + lane % PANEL; };
    if (side.k_stride == 1)
      for (long lane = 0; lane < count; lane += LANES)
        for (long k = 0; k < steps; k += LANES)
          transpose_block(from + lane * side.row_stride + k, side.row_stride, place(lane) + k * PANEL, PANEL, left(count - lane),
                          left(steps - k), true);
    else
      for (long k = 0; k < steps; ++k)
        for_vectors(count, [&](long lane, int n) { store(place(lane) + k * PANEL, load_lanes(from + lane + k * side.k_stride, n)); });
  }

  // Groups of [ROWS][ROW_LD], or where k is strided of [k][LANES].
  static void pack_rows(const Side<Element>& side, long first, long count, long k0, long steps, char* to) {
    float* groups = reinterpret_cast<float*>(to);
    const Element* from = side.at + first * side.row_stride + k0 * side.k_stride;
    if (side.k_stride == 1) {
      for (long r = 0; r < count; ++r)
        for_vectors(steps, [&](long k, int n) { 
          store_lanes(groups + r / ROWS * GROUP + r % ROWS * ROW_LD + k, load_lanes(from + r * side.row_stride + k, n), n);
        });
      return;
    }
    for (long k = 0; k < steps; ++k)
      for (long r = 0; r < count; r += ROWS)
        store(groups + r / ROWS * GROUP + k * LANES, load_lanes(from + k * side.k_stride + r, left(count - r)));
  }

  template <int MR, int NV, bool BY_ROWS>
  static void accumulate(const float* a, const float* b, float* c, long ld, long steps) {
    vec sum[MR][NV];
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
      for (int n = 0; n < NV; ++n) sum[m][n] = load(c + m * ld + n * LANES);
    for (long k = 0; k < steps; ++k) {
      vec lanes[NV];
#pragma GCC unroll 2
      for (int n = 0; n < NV; ++n) lanes[n] = load(b + k * PANEL + n * LANES);
#pragma GCC unroll 16
      for (int m = 0; m < MR; ++m) {
        const vec x = splat(BY_ROWS ? a[m * ROW_LD + k] : a[k * LANES + m]);
#pragma GCC unroll 2
        for (int n = 0; n < NV; ++n) sum[m][n] += x * lanes[n];
      }
    }
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m)
#pragma GCC unroll 2
      for (int n = 0; n < NV; ++n) store(c + m * ld + n * LANES, sum[m][n]);
  }

  template <int NV, bool BY_ROWS, int MR = int(ROWS)>
  static void of_rows(int rows, const float* a, const float* b, float* c, long ld, long steps) {
    if (rows == MR)
      accumulate<MR, NV, BY_ROWS>(a, b, c, ld, steps);
    else if constexpr (MR > 1)
      of_rows<NV, BY_ROWS, MR - 1>(rows, a, b, c, ld, steps);
  }

  static void multiply(const Side<Element>& side, const char* packed_rows, const char* packed_lanes, float* c, long ld, int rows,
                       long lanes, long steps) {
    const float *a = reinterpret_cast<const float*>(packed_rows), *b = reinterpret_cast<const float*>(packed_lanes);
    if (side.k_stride == 1)
      lanes <= LANES ? of_rows<1, true>(rows, a, b, c, ld, steps) : of_rows<2, true>(rows, a, b, c, ld, steps);
    else
      lanes <= LANES ? of_rows<1, false>(rows, a, b, c, ld, steps) : of_rows<2, false>(rows, a, b, c, ld, steps);
  }
};

}  // namespace
