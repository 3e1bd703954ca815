// What both forms of attention share: the call, its sizes, masks, rotation and copies of rows.
#pragma once

#include "parallel.h"
#include "simd.h"

namespace {

constexpr int TILE = 64;
constexpr float LOG2_E = 1.44269504088896341f;
constexpr float LN_2 = 0.69314718055994531f;
constexpr float LOWEST = -1e30f;  // a finite "minus infinity": the difference of two is 0, not NaN

inline long round_up(long n, long multiple) { return (n + multiple - 1) / multiple * multiple; }

}  // namespace

// The call, as ctypes fills it. Strides are in elements, of dims (B, T, heads); the head's width is contiguous.
extern "C" struct Attention {
  int64_t batch, tokens, first, heads, kv_heads, width, threads, is_bf16;  // queries are those of tokens from `first` on
  const void *q, *k, *v;
  int64_t q_stride[3], k_stride[3], v_stride[3];
  const float *cos, *sin;  // [T, K/2]
  const int32_t* starts;   // [B, T] or null
  void* out;               // [B, T - first, H, K]
  float* logsumexp;        // [B, H, T - first]
  float* workspace;
  const void* grad_out;
  int64_t grad_out_stride[3];
  void *grad_q, *grad_k, *grad_v;  // contiguous
};

namespace {

struct Sizes {
  long tokens, first, width, lanes_width, tiles, padded, rows, wide_rows;
  explicit Sizes(const Attention& a)
      : tokens(a.tokens),
        first(a.first),
        width(a.width),
        lanes_width(round_up(a.width, LANES)),
        tiles((a.tokens + TILE - 1) / TILE),
        padded(tiles * TILE),
        rows(padded * width),
        wide_rows(padded * lanes_width) {}
  int rows_in(long tile) const { return int(tokens - tile * TILE < TILE ? tokens - tile * TILE : TILE); }
  int skipped_in(long tile) const { return int(first > tile * TILE ? first - tile * TILE : 0); }
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

// Calls wide(strip) with WIDE vectors of queries away from the diagonal, and narrow(strip) with NARROW on it, where half of the
// pairs are masked: keys past a strip's last query are left out. Narrow strips also serve a tile of few queries, and one whose
// first `skip` have none.
template <int WIDE, int NARROW, class Wide, class Narrow>
void for_strips(long query_tile, long key_tile, int skip, int rows, bool cut, const int32_t* starts, Wide wide, Narrow narrow) {
  const bool diagonal = query_tile == key_tile, few = skip || rows <= NARROW * LANES;
  const int step = (diagonal || few ? NARROW : WIDE) * LANES;
  for (int s = skip / step * step; s < rows; s += step) {
    const Strip strip{key_tile * TILE, query_tile * TILE + s, diagonal ? (s + step < TILE ? s + step : TILE) : TILE, s,
                      diagonal || cut, starts ? starts + query_tile * TILE + s : nullptr, rows - s};
    if (diagonal || few)
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

template <class Element>
const Element* row(const void* base, const int64_t* stride, long b, long t, long h) {
  return static_cast<const Element*>(base) + b * stride[0] + t * stride[1] + h * stride[2];
}

// Normalizes a tile's output, [K][64], and writes it and the logsumexp. `top` in units of `unit` powers of 2.
template <class Element>
void write_output(const Attention& a, const Sizes& z, long b, long h, long tile, float* out_KI, const float* top, float unit,
                  const float* sum, float* scratch) {
  const int rows = z.rows_in(tile), skip = z.skipped_in(tile);
  const long t = tile * TILE + skip - z.first, queries = z.tokens - z.first;
  float* lse = a.logsumexp + (b * a.heads + h) * queries + t;
  for (int i = skip; i < rows; ++i) lse[i - skip] = (top[i] * unit + std::log2(sum[i])) * LN_2;
  for (int i = 0; i < TILE; i += LANES) {
    const vec inverse = splat(1.0f) / load(sum + i);
    for (long k = 0; k < z.width; ++k) {
      float* x = out_KI + k * TILE + i;
      store(x, load(x) * inverse);
    }
  }
  transpose_back(out_KI, scratch, z.width, z.width, rows);
  Element* out = static_cast<Element*>(a.out) + ((b * queries + t) * a.heads + h) * z.width;
  copy(scratch + skip * z.width, z.width, out, a.heads * z.width, rows - skip, z.width);
}

// Sums a group's query heads in order, rotates back and writes. A head's gradients of keys and of values, each [padded T][ld],
// follow one another, and the heads of a group follow one another.
template <class Element>
void write_keys(const Attention& a, const Sizes& z, long b, long g, long tile, float* grads, long ld, float scale) {
  const int rows = z.rows_in(tile);
  const long t = tile * TILE, group = a.heads / a.kv_heads, to = ((b * z.tokens + t) * a.kv_heads + g) * z.width;
  float *k = grads + t * ld, *v = k + z.padded * ld;
  for (long h = 1; h < group; ++h) {
    const long next = h * 2 * z.padded * ld;
    for (long i = 0; i < TILE * ld; ++i) k[i] += k[next + i], v[i] += v[next + i];
  }
  rotate<-1>(k, ld, static_cast<Element*>(a.grad_k) + to, a.kv_heads * z.width, a, t, rows, scale);
  copy(v, ld, static_cast<Element*>(a.grad_v) + to, a.kv_heads * z.width, rows, z.width);
}

// Rotates a tile's gradient of queries, [K][64], back and writes it.
template <class Element>
void write_queries(const Attention& a, const Sizes& z, long b, long h, long tile, const float* grad_KI, float* scratch) {
  const int rows = z.rows_in(tile);
  const long t = tile * TILE;
  transpose_back(grad_KI, scratch, z.width, z.width, rows);
  Element* y = static_cast<Element*>(a.grad_q) + ((b * z.tokens + t) * a.heads + h) * z.width;
  rotate<-1>(scratch, z.width, y, a.heads * z.width, a, t, rows, 1.0f / std::sqrt(float(z.width)));
}

// What the backward subtracts from a row's dp, sum_k grad_out * out, and the row's logsumexp in powers of 2.
template <class Element>
void row_constants(const Attention& a, const Sizes& z, long b, long h, long tile, const float* grad, long ld, float* dot,
                   float* lse) {
  const int rows = z.rows_in(tile);
  const long t = tile * TILE;
  const Element* out = static_cast<const Element*>(a.out) + ((b * z.tokens + t) * a.heads + h) * z.width;
  const float* given = a.logsumexp + (b * a.heads + h) * z.tokens + t;
  for (int i = 0; i < TILE; ++i) {
    float sum = 0.0f;
    if (i < rows)
      for (long k = 0; k < z.width; ++k) sum += to_float(out[i * a.heads * z.width + k]) * grad[i * ld + k];
    dot[i] = sum;
    lse[i] = i < rows ? given[i] * LOG2_E : 0.0f;
  }
}

}  // namespace
