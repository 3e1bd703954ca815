// Sums, softmax, log-softmax and the gradient of an embedding, each with one fixed order of additions.
//
//   softmax:  p_j = e^(x_j - top) / sum_i e^(x_i - top);      dx = p (dy - sum_i p_i dy_i)
//   log-softmax:  y_j = x_j - top - log sum_i e^(x_i - top);  dx = dy - e^y sum_i dy_i
//   embedding:  dW_v = sum over the tokens t that are v, t ascending, of dy_t
//
// Arithmetic is fp32 whatever the elements are. A row, a piece of a row or a slice of columns is one task's, so bits do not
// depend on threads, on other rows, or on where a row lies.
#include "parallel.h"
#include "simd.h"

namespace {

constexpr long ROWS = 8;        // of a task
constexpr long PIECE = 16384;   // elements of a row that are summed alone
constexpr long COLUMNS = 256;   // of an embedding's task
constexpr long BLOCK = 64;      // rows that a sum over rows takes together
constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.69314718055994531f;
constexpr float LOWEST = -3.0e38f;

// The sum of n values: four vectors of partial sums, whole vectors only, then their tree. get(i, count) must give zeros past
// count.
template <class Get>
INLINE float sum_of(long n, Get get) {
  vec sums[4] = {};
  long i = 0;
  for (; i + 4 * LANES <= n; i += 4 * LANES)
    for (int k = 0; k < 4; ++k) sums[k] += get(i + k * LANES, LANES);
  for_vectors(n - i, [&](long j, int count) { sums[0] += get(i + j, count); });
  return sum_of_lanes((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

INLINE vec only(vec v, int count) {
  for (int lane = count; lane < LANES; ++lane) v[lane] = 0.0f;
  return v;
}

template <class Element>
INLINE float top_of(const Element* x, long width) {
  vec tops = splat(LOWEST);
  for_vectors(width, [&](long j, int count) {
    vec v = load_lanes(x + j, count);
    for (int lane = count; lane < LANES; ++lane) v[lane] = LOWEST;
    tops = larger(v, tops);
  });
  float top = tops[0];
  for (int lane = 1; lane < LANES; ++lane) top = tops[lane] > top ? tops[lane] : top;
  return top;
}

template <class F>
void for_rows(long rows, int threads, F f) {
  parallel_for(threads, (rows + ROWS - 1) / ROWS, [=](long task, int) {
    for (long row = task * ROWS; row < rows && row < (task + 1) * ROWS; ++row) f(row);
  });
}

template <class Element>
void softmax(const Element* x, Element* y, long rows, long width, int is_log, int threads) {
  for_rows(rows, threads, [=](long row) {
    const Element* in = x + row * width;
    Element* out = y + row * width;
    const float top = top_of(in, width);
    const vec base = splat(top * LOG2_E), log2_e = splat(LOG2_E);
    const float sum = sum_of(width, [&](long j, int count) { return only(exp2_of(load_lanes(in + j, count) * log2_e - base), count); });
    const vec inverse = splat(1.0f / sum), tops = splat(top), log_sum = splat(std::log2(sum) * LN_2);
    if (is_log)
      for_vectors(width, [&](long j, int count) { store_lanes(out + j, (load_lanes(in + j, count) - tops) - log_sum, count); });
    else
      for_vectors(width, [&](long j, int count) {
        store_lanes(out + j, exp2_of(load_lanes(in + j, count) * log2_e - base) * inverse, count);
      });
  });
}

template <class Element>
void softmax_backward(const Element* grad, const Element* y, Element* grad_x, long rows, long width, int is_log, int threads) {
  for_rows(rows, threads, [=](long row) {
    const Element *dy = grad + row * width, *p = y + row * width;
    Element* dx = grad_x + row * width;
    const vec log2_e = splat(LOG2_E);
    if (is_log) {
      const vec sum = splat(sum_of(width, [&](long j, int count) { return load_lanes(dy + j, count); }));
      for_vectors(width, [&](long j, int count) {
        store_lanes(dx + j, load_lanes(dy + j, count) - exp2_of(load_lanes(p + j, count) * log2_e) * sum, count);
      });
    } else {
      const vec dot = splat(sum_of(width, [&](long j, int count) { return load_lanes(dy + j, count) * load_lanes(p + j, count); }));
      for_vectors(width, [&](long j, int count) {
        store_lanes(dx + j, load_lanes(p + j, count) * (load_lanes(dy + j, count) - dot), count);
      });
    }
  });
}

// partials: [rows, ceil(width / PIECE)], work space. Pieces are added in order.
template <class Element>
void sum_rows(const Element* x, float* y, float* partials, long rows, long width, int threads) {
  const long pieces = (width + PIECE - 1) / PIECE, together = pieces == 1 ? BLOCK : 1;
  parallel_for(threads, (rows * pieces + together - 1) / together, [=](long task, int) {
    for (long i = task * together; i < rows * pieces && i < (task + 1) * together; ++i) {
      const long row = i / pieces, first = i % pieces * PIECE;
      const Element* in = x + row * width + first;
      partials[i] = sum_of(width - first < PIECE ? width - first : PIECE, [&](long j, int count) { return load_lanes(in + j, count); });
    }
  });
  for (long row = 0; row < rows; ++row) {
    float sum = 0.0f;
    for (long piece = 0; piece < pieces; ++piece) sum += partials[row * pieces + piece];
    y[row] = sum;
  }
}

// Sums over rows, for each of `outer` matrices [rows, width]: rows ascend within a block of BLOCK, blocks ascend.
template <class Element>
void sum_columns(const Element* x, float* y, long outer, long rows, long width, int threads) {
  const long slices = (width + COLUMNS - 1) / COLUMNS;
  parallel_for(threads, outer * slices, [=](long task, int) {
    const long first = task % slices * COLUMNS, n = width - first < COLUMNS ? width - first : COLUMNS;
    const Element* in = x + task / slices * rows * width + first;
    float* total = y + task / slices * width + first;
    float block[COLUMNS];
    std::memset(total, 0, sizeof(float) * n);
    for (long start = 0; start < rows; start += BLOCK) {
      std::memset(block, 0, sizeof block);
      for (long row = start; row < rows && row < start + BLOCK; ++row)
        for_vectors(n, [&](long j, int count) {
          store_lanes(block + j, load_lanes(block + j, count) + load_lanes(in + row * width + j, count), count);
        });
      for (long j = 0; j < n; ++j) total[j] += block[j];
    }
  });
}

// grad_weight is zero before.
template <class Element>
void embedding_backward(const Element* grad, const int64_t* tokens, float* grad_weight, long num_tokens, long width,
                        int threads) {
  const long slices = (width + COLUMNS - 1) / COLUMNS;
  parallel_for(threads, slices, [=](long slice, int) {
    const long first = slice * COLUMNS, n = width - first < COLUMNS ? width - first : COLUMNS;
    for (long t = 0; t < num_tokens; ++t) {
      float* row = grad_weight + tokens[t] * width + first;
      const Element* dy = grad + t * width + first;
      for_vectors(n, [&](long j, int count) {
        store_lanes(row + j, load_lanes(row + j, count) + load_lanes(dy + j, count), count);
      });
    }
  });
}

}  // namespace

#define BY_ELEMENT(is_bf16, call) \
  if (is_bf16) {                  \
    using E = bf16;               \
    call;                         \
  } else {                        \
    using E = float;              \
    call;                         \
  }

extern "C" void drumline_softmax(const void* x, void* y, int64_t rows, int64_t width, int is_log, int is_bf16, int threads) {
  BY_ELEMENT(is_bf16, softmax(static_cast<const E*>(x), static_cast<E*>(y), rows, width, is_log, threads))
}

extern "C" void drumline_softmax_backward(const void* grad, const void* y, void* grad_x, int64_t rows, int64_t width, int is_log,
                                          int is_bf16, int threads) {
  BY_ELEMENT(is_bf16, softmax_backward(static_cast<const E*>(grad), static_cast<const E*>(y), static_cast<E*>(grad_x), rows, width,
                                       is_log, threads))
}

extern "C" int64_t drumline_sum_partials(int64_t rows, int64_t width) { return rows * ((width + PIECE - 1) / PIECE); }

extern "C" void drumline_sum_rows(const void* x, float* y, float* partials, int64_t rows, int64_t width, int is_bf16, int threads) {
  BY_ELEMENT(is_bf16, sum_rows(static_cast<const E*>(x), y, partials, rows, width, threads))
}

extern "C" void drumline_sum_columns(const void* x, float* y, int64_t outer, int64_t rows, int64_t width, int is_bf16,
                                     int threads) {
  BY_ELEMENT(is_bf16, sum_columns(static_cast<const E*>(x), y, outer, rows, width, threads))
}

extern "C" void drumline_embedding_backward(const void* grad, const int64_t* tokens, float* grad_weight, int64_t num_tokens,
                                            int64_t width, int is_bf16, int threads) {
  BY_ELEMENT(is_bf16, embedding_backward(static_cast<const E*>(grad), tokens, grad_weight, num_tokens, width, threads))
}
