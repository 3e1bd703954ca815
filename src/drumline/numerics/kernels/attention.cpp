// Causal attention with rotary positions, forward and backward, in tiles of 64 queries by 64 keys that never become memory.
//
//   s_ij = rope(q_i) . rope(k_j) / sqrt(K);  p_i = softmax over starts_i <= j <= i of s_i;  out_i = sum_j p_ij v_j
//
// Online softmax after Milakov & Gimelshein 2018 (arXiv:1805.02867); tiling and the backward after Dao et al. 2022
// (arXiv:2205.14135), "FlashAttention". Letters: B sequences, T tokens, H query heads, G key/value heads, K head width.
//
// Scores are held transposed, keys by queries, with queries in the vector lanes: maxima, sums and rescaling are then plain
// vector operations, and any head width runs without padding. Tiles start at multiples of 64 tokens of the row, keys are summed
// in ascending order, and a masked pair contributes an exact zero: so the bits of a row do not depend on the batch, on later
// tokens, or on the number of threads.
#include "parallel.h"
#include "simd.h"

namespace {

constexpr int TILE = 64;
constexpr int WIDE = LANES == 16 ? 4 : LANES == 8 ? 2 : 4;    // vectors of queries at a time away from the diagonal
constexpr int NARROW = LANES == 16 ? 1 : LANES == 8 ? 2 : 4;  // and on it, where half of a tile is masked
constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LN_2 = 0.69314718055994531f;
constexpr float LOWEST = -1e30f;  // a finite "minus infinity": the difference of two is 0, not NaN

inline long round_up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

// The call, as ctypes fills it. Strides are in elements, of dims (B, T, heads); the head's width is contiguous.
extern "C" struct Attention {
  int64_t batch, tokens, heads, kv_heads, width, threads, is_bf16;
  const void *q, *k, *v;
  int64_t q_stride[3], k_stride[3], v_stride[3];
  const float *cos, *sin;  // [T, K/2]
  const int32_t* starts;   // [B, T] or null
  void* out;               // [B, T, H, K]
  float* logsumexp;        // [B, H, T]
  float* workspace;
  const void* grad_out;
  int64_t grad_out_stride[3];
  void *grad_q, *grad_k, *grad_v;  // contiguous
};

namespace {

struct Sizes {
  long tokens, width, lanes_width, tiles, padded, rows, wide_rows;
  explicit Sizes(const Attention& a)
      : tokens(a.tokens),
        width(a.width),
        lanes_width(round_up(a.width, LANES)),
        tiles((a.tokens + TILE - 1) / TILE),
        padded(tiles * TILE),
        rows(padded * width),
        wide_rows(padded * lanes_width) {}
  int rows_in(long tile) const { return int(tokens - tile * TILE < TILE ? tokens - tile * TILE : TILE); }
};

// Which keys the queries of a tile may see.
struct Span {
  int32_t first, last;  // smallest and largest start of the tile's queries
  Span(const int32_t* starts, int rows) : first(0), last(0) {
    if (!starts) return;
    first = last = starts[0];
    for (int i = 1; i < rows; ++i) {
      first = starts[i] < first ? starts[i] : first;
      last = starts[i] > last ? starts[i] : last;
    }
  }
  bool misses(long key_tile) const { return (key_tile + 1) * TILE <= first; }
  bool cuts(long key_tile) const { return key_tile * TILE < last; }
};

// x * rope(row) for `rows` tokens from `token`, into y[rows][ld]; SIGN = -1 rotates back.
template <int SIGN, class From, class To>
void rotate(const From* x, long x_stride, To* y, long ld, const Attention& a, long token, int rows, float scale) {
  const long half = a.width / 2;
  for (int i = 0; i < rows; ++i, x += x_stride, y += ld) {
    const float *cos = a.cos + (token + i) * half, *sin = a.sin + (token + i) * half;
    for (long k = 0; k < half; ++k) {
      const float u = to_float(x[k]) * scale, w = to_float(x[k + half]) * scale, s = SIGN * sin[k];
      from_float(u * cos[k] - w * s, &y[k]);
      from_float(w * cos[k] + u * s, &y[k + half]);
    }
  }
}

template <class From, class To>
void copy(const From* x, long x_stride, To* y, long ld, int rows, long width) {
  for (int i = 0; i < rows; ++i, x += x_stride, y += ld)
    for (long k = 0; k < width; ++k) from_float(to_float(x[k]), &y[k]);
}

void zero_rows(float* y, long ld, int from, int to) {
  if (from < to) std::memset(y + from * ld, 0, sizeof(float) * ld * (to - from));
}

// y[k][i] = x[i][k] for a tile of TILE rows.
void transpose(const float* x, long ld, float* y, long width) {
  for (int i = 0; i < TILE; i += LANES)
    for (long k = 0; k < width; ++k)
      for (int lane = 0; lane < LANES; ++lane) y[k * TILE + i + lane] = x[(i + lane) * ld + k];
}
void transpose_back(const float* x, float* y, long ld, long width, int rows) {
  for (int i = 0; i < rows; ++i)
    for (long k = 0; k < width; ++k) y[i * ld + k] = x[k * TILE + i];
}

// The pairs (key0 + j, query0 + lane) that the mask lets through, as all-ones lanes.
struct Mask {
  bool active;
  ivec query, start;
  Mask(bool is_active, long query0, const int32_t* starts, int rows_left) : active(is_active), query{}, start{} {
    if (!active) return;
    for (int lane = 0; lane < LANES; ++lane) {
      query[lane] = int32_t(query0 + lane);
      start[lane] = starts && lane < rows_left ? starts[lane] : 0;
    }
  }
  ivec allows(long key) const {
    const ivec k = int32_t(key) - ivec{};
    return (k <= query) & (start <= k);
  }
};

struct Strip {  // NV vectors of queries of one tile, against one tile of keys
  long key0, query0;
  int keys, offset;  // keys to look at; first query within its tile
  bool masked;
  const int32_t* starts;  // of the strip's first query, or null
  int rows_left;
};

// Calls f<NV>(strip) for the strips of a tile pair that are not masked away.
template <class Wide, class Narrow>
void for_strips(long query_tile, long key_tile, int rows, bool cut, const int32_t* starts, Wide wide, Narrow narrow) {
  const bool diagonal = query_tile == key_tile;
  const int step = (diagonal ? NARROW : WIDE) * LANES;
  for (int s = 0; s < rows; s += step) {
    const Strip strip{key_tile * TILE, query_tile * TILE + s, diagonal ? (s + step < TILE ? s + step : TILE) : TILE, s,
                      diagonal || cut, starts ? starts + query_tile * TILE + s : nullptr, rows - s};
    if (diagonal)
      narrow(strip);
    else
      wide(strip);
  }
}

template <int NV>
INLINE void masks_of(const Strip& s, Mask* masks) {
  for (int n = 0; n < NV; ++n)
    masks[n] = Mask(s.masked, s.query0 + n * LANES, s.starts ? s.starts + n * LANES : nullptr, s.rows_left - n * LANES);
}
#define MASKS(NV, strip)                                       \
  Mask masks[4] = {{false, 0, nullptr, 0}, {false, 0, nullptr, 0}, {false, 0, nullptr, 0}, {false, 0, nullptr, 0}}; \
  masks_of<NV>(strip, masks)

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

template <class Element>
const Element* row(const void* base, const int64_t* stride, long b, long t, long h) {
  return static_cast<const Element*>(base) + b * stride[0] + t * stride[1] + h * stride[2];
}

// Rotated keys and values of one head and tile, in fp32; rows past the end are zero.
template <class Element>
void pack_keys(const Attention& a, const Sizes& z, long b, long g, long tile, float* k_TK, float* v_TK) {
  const int rows = z.rows_in(tile);
  const long t = tile * TILE;
  k_TK += t * z.width, v_TK += t * z.width;
  rotate<1>(row<Element>(a.k, a.k_stride, b, t, g), a.k_stride[1], k_TK, z.width, a, t, rows, 1.0f);
  copy(row<Element>(a.v, a.v_stride, b, t, g), a.v_stride[1], v_TK, z.width, rows, z.width);
  zero_rows(k_TK, z.width, rows, TILE);
  zero_rows(v_TK, z.width, rows, TILE);
}

long forward_scratch(const Sizes& z) { return TILE * (3 * z.width + TILE + 2); }

template <class Element>
void forward_tile(const Attention& a, const Sizes& z, long b, long h, long tile, const float* k_TK, const float* v_TK,
                  float* scratch) {
  float *q_IK = scratch, *q_KI = q_IK + TILE * z.width, *out_KI = q_KI + TILE * z.width;
  float *score = out_KI + TILE * z.width, *top = score + TILE * TILE, *sum = top + TILE;
  const int rows = z.rows_in(tile);
  const long t = tile * TILE;
  const int32_t* starts = a.starts ? a.starts + b * z.tokens : nullptr;
  const Span span(starts ? starts + t : nullptr, rows);

  rotate<1>(row<Element>(a.q, a.q_stride, b, t, h), a.q_stride[1], q_IK, z.width, a, t, rows,
            LOG2_E / std::sqrt(float(z.width)));
  zero_rows(q_IK, z.width, rows, TILE);
  transpose(q_IK, z.width, q_KI, z.width);
  std::memset(out_KI, 0, sizeof(float) * TILE * z.width);
  for (int i = 0; i < TILE; ++i) top[i] = LOWEST, sum[i] = 0.0f;

  for (long keys = 0; keys <= tile; ++keys) {
    if (span.misses(keys)) continue;
    const float *k = k_TK + keys * TILE * z.width, *v = v_TK + keys * TILE * z.width;
    for_strips(
        tile, keys, rows, span.cuts(keys), starts,
        [&](const Strip& s) { forward_strip<WIDE>(s, z.width, q_KI, k, v, score, out_KI, top, sum); },
        [&](const Strip& s) { forward_strip<NARROW>(s, z.width, q_KI, k, v, score, out_KI, top, sum); });
  }

  float* lse = a.logsumexp + (b * a.heads + h) * z.tokens + t;
  for (int i = 0; i < rows; ++i) lse[i] = (top[i] + std::log2(sum[i])) * LN_2;
  for (int i = 0; i < TILE; i += LANES) {
    const vec inverse = splat(1.0f) / load(sum + i);
    for (long k = 0; k < z.width; ++k) {
      float* x = out_KI + k * TILE + i;
      store(x, load(x) * inverse);
    }
  }
  transpose_back(out_KI, q_IK, z.width, z.width, rows);
  Element* out = static_cast<Element*>(a.out) + ((b * z.tokens + t) * a.heads + h) * z.width;
  copy(q_IK, z.width, out, a.heads * z.width, rows, z.width);
}

template <class Element>
void forward(const Attention& a) {
  const Sizes z(a);
  const long group = a.heads / a.kv_heads;
  float *keys = a.workspace, *values = keys + a.batch * a.kv_heads * z.rows;
  float* scratch = values + a.batch * a.kv_heads * z.rows;
  parallel_for(int(a.threads), a.batch * a.kv_heads * z.tiles, [&](long task, int) {
    const long tile = task % z.tiles, head = task / z.tiles;
    pack_keys<Element>(a, z, head / a.kv_heads, head % a.kv_heads, tile, keys + head * z.rows, values + head * z.rows);
  });
  parallel_for(int(a.threads), a.batch * a.heads * z.tiles, [&](long task, int thread) {
    const long tile = z.tiles - 1 - task % z.tiles, head = task / z.tiles, b = head / a.heads, h = head % a.heads;
    const long kv = b * a.kv_heads + h / group;
    forward_tile<Element>(a, z, b, h, tile, keys + kv * z.rows, values + kv * z.rows, scratch + thread * forward_scratch(z));
  });
}

// What the backward of one query head reads and sums, in fp32.
struct Head {
  float *k_TK, *v_TK;                     // keys rotated
  float *q_KI, *grad_out_KI, *grad_q_KI;  // tiles of [K, 64], queries rotated and scaled by log2(e) / sqrt(K)
  float *q_TK, *grad_out_TK;              // the same by rows, padded to whole vectors
  float *lse_T, *dot_T;                   // logsumexp in powers of 2; sum_k grad_out * out
  float *grad_k_TK, *grad_v_TK;           // padded likewise
  static long size(const Sizes& z) { return 5 * z.rows + 2 * z.wide_rows + 2 * z.padded; }
  static long grads_size(const Sizes& z) { return 2 * z.wide_rows; }
  Head(float* base, float* grads, const Sizes& z) {
    k_TK = base, v_TK = k_TK + z.rows;
    q_KI = v_TK + z.rows, grad_out_KI = q_KI + z.rows, grad_q_KI = grad_out_KI + z.rows;
    q_TK = grad_q_KI + z.rows, grad_out_TK = q_TK + z.wide_rows;
    lse_T = grad_out_TK + z.wide_rows, dot_T = lse_T + z.padded;
    grad_k_TK = grads, grad_v_TK = grads + z.wide_rows;
  }
};

template <class Element>
void pack_head(const Attention& a, const Sizes& z, long b, long h, const Head& d) {
  const long ld = z.lanes_width;
  for (long tile = 0; tile < z.tiles; ++tile) {
    pack_keys<Element>(a, z, b, h / (a.heads / a.kv_heads), tile, d.k_TK, d.v_TK);
    const int rows = z.rows_in(tile);
    const long t = tile * TILE;
    float *q = d.q_TK + t * ld, *grad = d.grad_out_TK + t * ld;
    if (ld > z.width || rows < TILE) zero_rows(q, ld, 0, TILE), zero_rows(grad, ld, 0, TILE);
    rotate<1>(row<Element>(a.q, a.q_stride, b, t, h), a.q_stride[1], q, ld, a, t, rows, LOG2_E / std::sqrt(float(z.width)));
    copy(row<Element>(a.grad_out, a.grad_out_stride, b, t, h), a.grad_out_stride[1], grad, ld, rows, z.width);
    transpose(q, ld, d.q_KI + t * z.width, z.width);
    transpose(grad, ld, d.grad_out_KI + t * z.width, z.width);
    const Element* out = static_cast<const Element*>(a.out) + ((b * z.tokens + t) * a.heads + h) * z.width;
    const float* lse = a.logsumexp + (b * a.heads + h) * z.tokens + t;
    for (int i = 0; i < TILE; ++i) {
      float dot = 0.0f;
      if (i < rows)
        for (long k = 0; k < z.width; ++k) dot += to_float(out[i * a.heads * z.width + k]) * grad[i * ld + k];
      d.dot_T[t + i] = dot;
      d.lse_T[t + i] = i < rows ? lse[i] * LOG2_E : 0.0f;
    }
  }
  std::memset(d.grad_q_KI, 0, sizeof(float) * z.rows);
  std::memset(d.grad_k_TK, 0, sizeof(float) * z.wide_rows);
  std::memset(d.grad_v_TK, 0, sizeof(float) * z.wide_rows);
}

// One strip of the backward: probabilities again, then its share of the gradients asked for.
template <int NV, bool QUERIES, bool KEYS>
void backward_strip(const Strip& s, const Sizes& z, const Head& d, float* p_JI, float* ds_JI) {
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

template <bool QUERIES, bool KEYS>
void backward_pair(const Attention& a, const Sizes& z, long b, long query_tile, long key_tile, const Head& d, float* scratch) {
  const int rows = z.rows_in(query_tile);
  const int32_t* starts = a.starts ? a.starts + b * z.tokens : nullptr;
  const Span span(starts ? starts + query_tile * TILE : nullptr, rows);
  if (span.misses(key_tile)) return;
  float* ds = scratch + TILE * TILE;
  for_strips(
      query_tile, key_tile, rows, span.cuts(key_tile), starts,
      [&](const Strip& s) { backward_strip<WIDE, QUERIES, KEYS>(s, z, d, scratch, ds); },
      [&](const Strip& s) { backward_strip<NARROW, QUERIES, KEYS>(s, z, d, scratch, ds); });
}

template <class Element>
void finish_queries(const Attention& a, const Sizes& z, long b, long h, long tile, const Head& d, float* scratch) {
  const int rows = z.rows_in(tile);
  const long t = tile * TILE;
  transpose_back(d.grad_q_KI + t * z.width, scratch, z.width, z.width, rows);  // the scores' place is free by now
  Element* y = static_cast<Element*>(a.grad_q) + ((b * z.tokens + t) * a.heads + h) * z.width;
  rotate<-1>(scratch, z.width, y, a.heads * z.width, a, t, rows, 1.0f / std::sqrt(float(z.width)));
}

// Sums a group's query heads in order, rotates back and writes.
template <class Element>
void finish_keys(const Attention& a, const Sizes& z, long b, long g, long tile, float* grads) {
  const int rows = z.rows_in(tile);
  const long t = tile * TILE, ld = z.lanes_width, group = a.heads / a.kv_heads, to = ((b * z.tokens + t) * a.kv_heads + g) * z.width;
  float *k = grads + t * ld, *v = k + z.wide_rows;
  for (long h = 1; h < group; ++h)
    for (long i = 0; i < TILE * ld; ++i) k[i] += k[h * Head::grads_size(z) + i], v[i] += v[h * Head::grads_size(z) + i];
  rotate<-1>(k, ld, static_cast<Element*>(a.grad_k) + to, a.kv_heads * z.width, a, t, rows, LN_2);
  copy(v, ld, static_cast<Element*>(a.grad_v) + to, a.kv_heads * z.width, rows, z.width);
}

// With enough heads a task is a head, and each pair of tiles is visited once. With few, a task is a tile: queries and keys then
// take a pass each. Both add the same numbers in the same order.
bool tasks_are_heads(const Attention& a) { return a.threads == 1 || a.batch * a.heads >= 2 * a.threads; }
// A slot belongs to a thread, or to a head if another task needs what is in it.
long num_slots(const Attention& a) { return tasks_are_heads(a) ? a.threads : a.batch * a.heads; }
bool keeps_grads(const Attention& a) { return !tasks_are_heads(a) || a.heads > a.kv_heads; }
long num_grads(const Attention& a) { return keeps_grads(a) ? a.batch * a.heads : a.threads; }

long backward_scratch(const Sizes& z) { return TILE * (z.width > 2 * TILE ? z.width : 2 * TILE); }

template <class Element>
void backward(const Attention& a) {
  const Sizes z(a);
  const int threads = int(a.threads);
  const long heads = a.batch * a.heads;
  float *scratches = a.workspace, *slots = scratches + threads * backward_scratch(z);
  float* grads = slots + num_slots(a) * Head::size(z);
  auto head_of = [&](long head, int thread) {
    const long slot = tasks_are_heads(a) ? thread : head, grad = keeps_grads(a) ? head : thread;
    return Head(slots + slot * Head::size(z), grads + grad * Head::grads_size(z), z);
  };
  auto scratch_of = [&](int thread) { return scratches + thread * backward_scratch(z); };

  if (tasks_are_heads(a)) {
    parallel_for(threads, heads, [&](long head, int thread) {
      const long b = head / a.heads, h = head % a.heads;
      const Head d = head_of(head, thread);
      float* scratch = scratch_of(thread);
      pack_head<Element>(a, z, b, h, d);
      for (long keys = 0; keys < z.tiles; ++keys)
        for (long tile = keys; tile < z.tiles; ++tile) backward_pair<true, true>(a, z, b, tile, keys, d, scratch);
      for (long tile = 0; tile < z.tiles; ++tile) finish_queries<Element>(a, z, b, h, tile, d, scratch);
      if (!keeps_grads(a))
        for (long tile = 0; tile < z.tiles; ++tile) finish_keys<Element>(a, z, b, h, tile, d.grad_k_TK);
    });
  } else {
    parallel_for(threads, heads, [&](long head, int thread) {
      pack_head<Element>(a, z, head / a.heads, head % a.heads, head_of(head, thread));
    });
    parallel_for(threads, 2 * heads * z.tiles, [&](long task, int thread) {
      const long tile = task / 2 % z.tiles, head = task / 2 / z.tiles, b = head / a.heads;
      const Head d = head_of(head, thread);
      float* scratch = scratch_of(thread);
      if (task % 2) {
        for (long other = tile; other < z.tiles; ++other) backward_pair<false, true>(a, z, b, other, tile, d, scratch);
      } else {
        for (long keys = 0; keys <= tile; ++keys) backward_pair<true, false>(a, z, b, tile, keys, d, scratch);
        finish_queries<Element>(a, z, b, head % a.heads, tile, d, scratch);
      }
    });
  }
  if (keeps_grads(a))
    parallel_for(threads, a.batch * a.kv_heads * z.tiles, [&](long task, int) {
      const long tile = task % z.tiles, kv = task / z.tiles, b = kv / a.kv_heads, g = kv % a.kv_heads;
      finish_keys<Element>(a, z, b, g, tile, head_of(b * a.heads + g * (a.heads / a.kv_heads), 0).grad_k_TK);
    });
}

}  // namespace

// Bytes of workspace that a call needs, aligned to 64.
extern "C" int64_t drumline_attention_workspace(const Attention* a, int is_backward) {
  const Sizes z(*a);
  if (!is_backward) return 4 * (2 * a->batch * a->kv_heads * z.rows + a->threads * forward_scratch(z));
  return 4 * (a->threads * backward_scratch(z) + num_slots(*a) * Head::size(z) + num_grads(*a) * Head::grads_size(z));
}

extern "C" void drumline_attention_forward(const Attention* a) { a->is_bf16 ? forward<bf16>(*a) : forward<float>(*a); }

extern "C" void drumline_attention_backward(const Attention* a) { a->is_bf16 ? backward<bf16>(*a) : backward<float>(*a); }
