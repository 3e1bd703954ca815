// Vectors of floats for whatever the compiler targets, and the two pieces that the kernels are made of: a register-blocked
// matmul and an exponential. Written with the compilers' vector extension, so one source serves AVX-512, AVX2, SSE and NEON.
//
// Every lane does the same arithmetic in the same order whatever the blocking around it: that is what keeps bits independent of
// tiles, tails and threads. Do not add -ffast-math: it would reassociate sums and drop NaNs.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>

#if defined(__AVX512F__)
constexpr int LANES = 16;
#elif defined(__AVX__)
constexpr int LANES = 8;
#else
constexpr int LANES = 4;
#endif

typedef float vec __attribute__((vector_size(LANES * 4)));
typedef int32_t ivec __attribute__((vector_size(LANES * 4)));
typedef uint32_t uvec __attribute__((vector_size(LANES * 4)));
typedef uint16_t hvec __attribute__((vector_size(LANES * 2)));

#define INLINE inline __attribute__((always_inline))

template <class V, class T>
INLINE V load_as(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);
  return v;
}
INLINE vec load(const float* p) { return load_as<vec>(p); }
INLINE void store(float* p, vec v) { std::memcpy(p, &v, sizeof v); }
INLINE vec splat(float x) { return x - vec{}; }
INLINE vec larger(vec a, vec b) { return a > b ? a : b; }

// bfloat16, rounded to nearest even; a NaN stays a NaN.
struct bf16 {
  uint16_t bits;
};
INLINE float to_float(float x) { return x; }
INLINE float to_float(bf16 x) {
  const uint32_t bits = uint32_t(x.bits) << 16;
  float y;
  std::memcpy(&y, &bits, 4);
  return y;
}
INLINE void from_float(float x, float* y) { *y = x; }
INLINE void from_float(float x, bf16* y) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  y->bits = x == x ? uint16_t((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16) : uint16_t(0x7fc0u);
}

// 2^x for x <= 127, to about one unit in the last place; exactly 1 at 0, exactly 0 below -126.5; NaN stays NaN.
// Cody-Waite with a minimax polynomial of degree 6 on [-1/2, 1/2] (relative error 2.0e-9 before rounding), constant term 1.
INLINE vec exp2_of(vec x) {
  const vec floor = splat(-127.0f);
  x = x < floor ? floor : x;  // this order keeps a NaN
  const vec magic = splat(12582912.0f + 127.0f);  // 1.5 * 2^23 + bias: leaves round(x) + 127 in the low bits
  const vec shifted = x + magic;
  const vec f = x - (shifted - magic);
  uvec exponent;
  std::memcpy(&exponent, &shifted, sizeof exponent);
  exponent <<= 23;
  vec scale;
  std::memcpy(&scale, &exponent, sizeof scale);
  vec p = splat(0.00015353362059506692f);
  p = p * f + splat(0.0013398874588408567f);
  p = p * f + splat(0.009618437358500537f);
  p = p * f + splat(0.055503324707023925f);
  p = p * f + splat(0.24022647913611017f);
  p = p * f + splat(0.6931472028552508f);
  p = p * f + splat(1.0f);
  return p * scale;
}

// C[m, n] (+)= sum_p A(m, p) * B[p, n] for MR rows and NV vectors of columns held in registers; p ascends.
// COLUMN: A(m, p) is a[p * lda + m], else a[m * lda + p].
template <int MR, int NV, bool COLUMN, bool ADD>
INLINE void matmul_registers(int P, const float* a, long lda, const float* b, long ldb, float* c, long ldc) {
  vec sum[MR][NV];
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) sum[m][n] = ADD ? load(c + m * ldc + n * LANES) : vec{};
  for (int p = 0; p < P; ++p) {
    vec row[NV];
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) row[n] = load(b + p * ldb + n * LANES);
#pragma GCC unroll 16
    for (int m = 0; m < MR; ++m) {
      const vec x = splat(COLUMN ? a[p * lda + m] : a[m * lda + p]);
#pragma GCC unroll 8
      for (int n = 0; n < NV; ++n) sum[m][n] += x * row[n];
    }
  }
#pragma GCC unroll 16
  for (int m = 0; m < MR; ++m)
#pragma GCC unroll 8
    for (int n = 0; n < NV; ++n) store(c + m * ldc + n * LANES, sum[m][n]);
}

// The same for any number of rows M and NV vectors of columns.
template <int NV, bool COLUMN, bool ADD>
INLINE void matmul(int M, int P, const float* a, long lda, const float* b, long ldb, float* c, long ldc) {
  constexpr int MR = NV >= 4 ? 4 : NV == 2 ? 8 : LANES == 8 ? 8 : 16;  // keeps the sums within the register file
  const long step = COLUMN ? 1 : lda;
  int m = 0;
  for (; m + MR <= M; m += MR) matmul_registers<MR, NV, COLUMN, ADD>(P, a + m * step, lda, b, ldb, c + m * ldc, ldc);
  for (; m + 4 <= M; m += 4) matmul_registers<4, NV, COLUMN, ADD>(P, a + m * step, lda, b, ldb, c + m * ldc, ldc);
  for (; m < M; ++m) matmul_registers<1, NV, COLUMN, ADD>(P, a + m * step, lda, b, ldb, c + m * ldc, ldc);
}

// C[M, width] += A B for a width that is any multiple of LANES.
template <bool COLUMN>
INLINE void matmul_wide(int M, int P, const float* a, long lda, const float* b, float* c, int width) {
  int n = 0;
  for (; n + 4 * LANES <= width; n += 4 * LANES) matmul<4, COLUMN, true>(M, P, a, lda, b + n, width, c + n, width);
  for (; n + 2 * LANES <= width; n += 2 * LANES) matmul<2, COLUMN, true>(M, P, a, lda, b + n, width, c + n, width);
  for (; n < width; n += LANES) matmul<1, COLUMN, true>(M, P, a, lda, b + n, width, c + n, width);
}

// A vector of either element type; `count` < LANES loads zeros for the rest and stores nothing there.
INLINE vec load_lanes(const float* p, int count = LANES) {
  if (count == LANES) return load(p);
  vec v{};
  std::memcpy(&v, p, 4 * count);
  return v;
}
INLINE vec load_lanes(const bf16* p, int count = LANES) {
  hvec h{};
  std::memcpy(&h, p, 2 * count);
  const uvec bits = __builtin_convertvector(h, uvec) << 16;
  vec v;
  std::memcpy(&v, &bits, sizeof v);
  return v;
}
INLINE void store_lanes(float* p, vec v, int count = LANES) { std::memcpy(p, &v, 4 * count); }
INLINE void store_lanes(bf16* p, vec v, int count = LANES) {
  uvec bits;
  std::memcpy(&bits, &v, sizeof bits);
  bits = v == v ? (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16 : uvec{} + 0x7fc0u;
  const hvec h = __builtin_convertvector(bits, hvec);
  std::memcpy(p, &h, 2 * count);
}

// The sum of the lanes, by halves.
INLINE float sum_of_lanes(vec v) {
  for (int half = LANES / 2; half; half /= 2)
    for (int lane = 0; lane < half; ++lane) v[lane] += v[lane + half];
  return v[0];
}

// Calls f(index, count) for a row of n elements, a vector at a time; the last may be short.
template <class F>
INLINE void for_vectors(long n, F f) {
  long i = 0;
  for (; i + LANES <= n; i += LANES) f(i, LANES);
  if (i < n) f(i, int(n - i));
}
