// Attention for any CPU: all arithmetic in fp32 on the vectors of simd.h.
#pragma once

#include "attention_common.h"

namespace {

// One strip of the forward: scores, running maximum and sum, weighted values.
template <int NV>
void forward_strip(const Strip& s, long width, const float* q_KI, const float* k_JK, const float* v_JK, float* score_JI,
                   float* out_KI, float* max_I, float* sum_I) {
  constexpr int LD = NV * LANES;
  matmul<NV, false, false>(s.keys, int(width), k_JK, width, q_KI + s.offset, TILE, score_JI, LD);
  if (s.masked) {
    MASKS(NV, s);
    const vec nothing = splat(-INFINITY);
    for (int j = 0; j < s.keys; ++j)
      for (int n = 0; n < NV; ++n) {
        float* x = score_JI + j * LD + n * LANES;
        store(x, masks[n].allows(s.key0 + j) ? load(x) : nothing);
      }
  }
  vec top[NV], sum[NV], shrink[NV];
  for (int n = 0; n < NV; ++n) top[n] = load(max_I + s.offset + n * LANES);
  for (int j = 0; j < s.keys; ++j)
    for (int n = 0; n < NV; ++n) top[n] = larger(top[n], load(score_JI + j * LD + n * LANES));
  for (int n = 0; n < NV; ++n) {
    float* x = max_I + s.offset + n * LANES;
    shrink[n] = exp2_of(load(x) - top[n]);
    store(x, top[n]);
    sum[n] = vec{};
  }
  for (int j = 0; j < s.keys; ++j)
    for (int n = 0; n < NV; ++n) {
      float* x = score_JI + j * LD + n * LANES;
      const vec p = exp2_of(load(x) - top[n]);
      sum[n] += p;
      store(x, p);
    }
  for (int n = 0; n < NV; ++n) {
    float* x = sum_I + s.offset + n * LANES;
    store(x, load(x) * shrink[n] + sum[n]);
  }
  for (long k = 0; k < width; ++k)
    for (int n = 0; n < NV; ++n) {
      float* x = out_KI + k * TILE + s.offset + n * LANES;
      store(x, load(x) * shrink[n]);
    }
  matmul<NV, true, true>(int(width), s.keys, v_JK, width, score_JI, LD, out_KI + s.offset, TILE);
}

// What the backward of one query head reads and sums, in fp32.
struct PortableHead {
  float *k_TK, *v_TK;                     // keys rotated
  float *q_KI, *grad_out_KI, *grad_q_KI;  // tiles of [K, 64], queries rotated and scaled by log2(e) / sqrt(K)
  float *q_TK, *grad_out_TK;              // the same by rows, padded to whole vectors
  float *lse_T, *dot_T;                   // logsumexp in powers of 2; sum_k grad_out * out
  float *grad_k_TK, *grad_v_TK;           // padded likewise
  static long size(const Sizes& z) { return 5 * z.rows + 2 * z.wide_rows + 2 * z.padded; }
  static long grads_size(const Sizes& z) { return 2 * z.wide_rows; }
  PortableHead(float* base, float* grads, const Sizes& z) {
    k_TK = base, v_TK = k_TK + z.rows;
    q_KI = v_TK + z.rows, grad_out_KI = q_KI + z.rows, grad_q_KI = grad_out_KI + z.rows;
    q_TK = grad_q_KI + z.rows, grad_out_TK = q_TK + z.wide_rows;
    lse_T = grad_out_TK + z.wide_rows, dot_T = lse_T + z.padded;
    grad_k_TK = grads, grad_v_TK = grads + z.wide_rows;
  }
};

// One strip of the backward: probabilities again, then its share of the gradients asked for.
template <int NV, bool QUERIES, bool KEYS>
void backward_strip(const Strip& s, const Sizes& z, const PortableHead& d, float* p_JI, float* ds_JI) {
  constexpr int LD = NV * LANES;
  const int width = int(z.width);
  const long tile = s.query0 - s.offset;
  const float *k_JK = d.k_TK + s.key0 * z.width, *v_JK = d.v_TK + s.key0 * z.width;
  matmul<NV, false, false>(s.keys, width, k_JK, width, d.q_KI + tile * z.width + s.offset, TILE, p_JI, LD);
  matmul<NV, false, false>(s.keys, width, v_JK, width, d.grad_out_KI + tile * z.width + s.offset, TILE, ds_JI, LD);
  MASKS(NV, s);
  vec lse[NV], dot[NV];
  for (int n = 0; n < NV; ++n) lse[n] = load(d.lse_T + s.query0 + n * LANES), dot[n] = load(d.dot_T + s.query0 + n * LANES);
  for (int j = 0; j < s.keys; ++j)
    for (int n = 0; n < NV; ++n) {
      float *x = p_JI + j * LD + n * LANES, *y = ds_JI + j * LD + n * LANES;
      vec p = exp2_of(load(x) - lse[n]);
      if (s.masked) p = masks[n].allows(s.key0 + j) ? p : vec{};
      store(x, p);
      store(y, p * (load(y) - dot[n]));
    }
  if (QUERIES)
    matmul<NV, true, true>(width, s.keys, k_JK, width, ds_JI, LD, d.grad_q_KI + tile * z.width + s.offset, TILE);
  if (KEYS) {
    const long ld = z.lanes_width;
    matmul_wide<false>(s.keys, LD, p_JI, LD, d.grad_out_TK + s.query0 * ld, d.grad_v_TK + s.key0 * ld, int(ld));
    matmul_wide<false>(s.keys, LD, ds_JI, LD, d.q_TK + s.query0 * ld, d.grad_k_TK + s.key0 * ld, int(ld));
  }
}

template <class Element>
struct Portable {
  static constexpr int WIDE = LANES == 8 ? 2 : 4;
  static constexpr int NARROW = LANES == 16 ? 1 : LANES == 8 ? 2 : 4;
  static void enter(const Sizes&) {}
  static void leave() {}

  // Rotated keys and values of one head, in fp32; rows past the end are zero.
  static long keys_floats(const Sizes& z) { return 2 * z.rows; }
  static long forward_scratch(const Sizes& z) { return TILE * (3 * z.width + TILE + 2); }

  static void pack_keys(const Attention& a, const Sizes& z, long b, long g, long tile, float* keys, float*) {
    const int rows = z.rows_in(tile);
    const long t = tile * TILE;
    float *k_TK = keys + t * z.width, *v_TK = k_TK + z.rows;
    rotate<1>(row<Element>(a.k, a.k_stride, b, t, g), a.k_stride[1], k_TK, z.width, a, t, rows, 1.0f);
    copy(row<Element>(a.v, a.v_stride, b, t, g), a.v_stride[1], v_TK, z.width, rows, z.width);
    zero_rows(k_TK, z.width, rows, TILE);
    zero_rows(v_TK, z.width, rows, TILE);
  }

  static void forward_tile(const Attention& a, const Sizes& z, long b, long h, long tile, const float* keys, float* scratch) {
    float *q_IK = scratch, *q_KI = q_IK + TILE * z.width, *out_KI = q_KI + TILE * z.width;
    float *score = out_KI + TILE * z.width, *top = score + TILE * TILE, *sum = top + TILE;
    const int rows = z.rows_in(tile), skip = z.skipped_in(tile);
    const long t = tile * TILE;
    const int32_t* starts = a.starts ? a.starts + b * z.tokens : nullptr;
    const Span span(starts ? starts + t + skip : nullptr, rows - skip);

    zero_rows(q_IK, z.width, 0, skip);
    rotate<1>(row<Element>(a.q, a.q_stride, b, t + skip - z.first, h), a.q_stride[1], q_IK + skip * z.width, z.width, a, t + skip,
              rows - skip, LOG2_E / std::sqrt(float(z.width)));
    zero_rows(q_IK, z.width, rows, TILE);
    transpose(q_IK, z.width, q_KI, z.width);
    std::memset(out_KI, 0, sizeof(float) * TILE * z.width);
    for (int i = 0; i < TILE; ++i) top[i] = LOWEST, sum[i] = 0.0f;

    for (long other = 0; other <= tile; ++other) {
      if (span.misses(other)) continue;
      const float *k = keys + other * TILE * z.width, *v = k + z.rows;
      for_strips<WIDE, NARROW>(
          tile, other, skip, rows, span.cuts(other), starts,
          [&](const Strip& s) { forward_strip<WIDE>(s, z.width, q_KI, k, v, score, out_KI, top, sum); },
          [&](const Strip& s) { forward_strip<NARROW>(s, z.width, q_KI, k, v, score, out_KI, top, sum); });
    }
    write_output<Element>(a, z, b, h, tile, out_KI, top, 1.0f, sum, q_IK);
  }

  static long head_floats(const Sizes& z) { return PortableHead::size(z); }
  static long grads_floats(const Sizes& z) { return 2 * z.wide_rows; }
  static long backward_scratch(const Sizes& z) { return TILE * (z.width > 2 * TILE ? z.width : 2 * TILE); }

  static void pack_head(const Attention& a, const Sizes& z, long b, long h, float* base, float* grads, float*) {
    const PortableHead d(base, grads, z);
    const long ld = z.lanes_width;
    for (long tile = 0; tile < z.tiles; ++tile) {
      pack_keys(a, z, b, h / (a.heads / a.kv_heads), tile, d.k_TK, nullptr);
      const int rows = z.rows_in(tile);
      const long t = tile * TILE;
      float *q = d.q_TK + t * ld, *grad = d.grad_out_TK + t * ld;
      if (ld > z.width || rows < TILE) zero_rows(q, ld, 0, TILE), zero_rows(grad, ld, 0, TILE);
      rotate<1>(row<Element>(a.q, a.q_stride, b, t, h), a.q_stride[1], q, ld, a, t, rows, LOG2_E / std::sqrt(float(z.width)));
      copy(row<Element>(a.grad_out, a.grad_out_stride, b, t, h), a.grad_out_stride[1], grad, ld, rows, z.width);
      transpose(q, ld, d.q_KI + t * z.width, z.width);
      transpose(grad, ld, d.grad_out_KI + t * z.width, z.width);
      row_constants<Element>(a, z, b, h, tile, grad, ld, d.dot_T + t, d.lse_T + t);
    }
    std::memset(d.grad_q_KI, 0, sizeof(float) * z.rows);
    std::memset(d.grad_k_TK, 0, sizeof(float) * 2 * z.wide_rows);
  }

  template <bool QUERIES, bool KEYS>
  static void backward_pair(const Attention& a, const Sizes& z, long b, long query_tile, long key_tile, float* base,
                            float* grads, float* scratch) {
    const PortableHead d(base, grads, z);
    const int rows = z.rows_in(query_tile);
    const int32_t* starts = a.starts ? a.starts + b * z.tokens : nullptr;
    const Span span(starts ? starts + query_tile * TILE : nullptr, rows);
    if (span.misses(key_tile)) return;
    float* ds = scratch + TILE * TILE;
    for_strips<WIDE, NARROW>(
        query_tile, key_tile, 0, rows, span.cuts(key_tile), starts,
        [&](const Strip& s) { backward_strip<WIDE, QUERIES, KEYS>(s, z, d, scratch, ds); },
        [&](const Strip& s) { backward_strip<NARROW, QUERIES, KEYS>(s, z, d, scratch, ds); });
  }

  static void finish_queries(const Attention& a, const Sizes& z, long b, long h, long tile, float* base, float* scratch) {
    const PortableHead d(base, nullptr, z);
    write_queries<Element>(a, z, b, h, tile, d.grad_q_KI + tile * TILE * z.width, scratch);
  }

  // The queries carried a factor log2(e) / sqrt(K).
  static void finish_keys(const Attention& a, const Sizes& z, long b, long g, long tile, float* grads) {
    write_keys<Element>(a, z, b, g, tile, grads, z.lanes_width, LN_2);
  }
};

}  // namespace
