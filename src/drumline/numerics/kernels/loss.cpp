// Cross-entropy of rows of logits, which become their own gradient:  loss = log sum_v e^l_v - l_label;  dl = softmax - onehot.
//
// Two passes over a row: its maximum and the sum of exponentials around a running maximum, then the gradient. fp32 arithmetic;
// a row is one task's, so bits do not depend on threads or on other rows.
#include "parallel.h"
#include "simd.h"

namespace {

constexpr long ROWS = 8;
constexpr float LOG2_E = 1.44269504088896341f, LN_2 = 0.69314718055994531f;
constexpr float LOWEST = -3.0e38f;

template <class Element>
long cross_entropy(Element* logits, const int64_t* labels, float* losses, long rows, long width, long ignored, int with_gradient,
                   int threads) {
  long bad = 0;
  for (long row = 0; row < rows; ++row) bad += labels[row] != ignored && (labels[row] < 0 || labels[row] >= width);
  if (bad) return bad;
  parallel_for(threads, (rows + ROWS - 1) / ROWS, [=](long task, int) {
    for (long row = task * ROWS; row < rows && row < (task + 1) * ROWS; ++row) {
      Element* l = logits + row * width;
      if (labels[row] == ignored) {
        losses[row] = 0.0f;
        if (with_gradient) std::memset(l, 0, sizeof(Element) * width);
        continue;
      }
      vec tops = splat(LOWEST);
      for_vectors(width, [&](long j, int count) {
        vec v = load_lanes(l + j, count);
        for (int lane = count; lane < LANES; ++lane) v[lane] = LOWEST;
        tops = larger(v, tops);
      });
      float top = tops[0];
      for (int lane = 1; lane < LANES; ++lane) top = tops[lane] > top ? tops[lane] : top;
      vec sums{};
      const vec base = splat(top * LOG2_E), log2_e = splat(LOG2_E);
      for_vectors(width, [&](long j, int count) {
        vec e = exp2_of(load_lanes(l + j, count) * log2_e - base);
        for (int lane = count; lane < LANES; ++lane) e[lane] = 0.0f;
        sums += e;
      });
      const float sum = sum_of_lanes(sums), label = to_float(l[labels[row]]);
      losses[row] = (top - label) + std::log2(sum) * LN_2;
      if (!with_gradient) continue;
      const float probability = std::exp2(label * LOG2_E - top * LOG2_E) / sum;
      const vec inverse = splat(1.0f / sum);
      for_vectors(width, [&](long j, int count) {
        store_lanes(l + j, exp2_of(load_lanes(l + j, count) * log2_e - base) * inverse, count);
      });
      from_float(probability - 1.0f, &l[labels[row]]);
    }
  });
  return 0;
}

}  // namespace

// Returns how many labels are neither `ignored` nor in [0, width); nothing is computed if there are any.
extern "C" int64_t drumline_cross_entropy(void* logits, const int64_t* labels, float* losses, int64_t rows, int64_t width,
                                       int64_t ignored, int with_gradient, int is_bf16, int threads) {
  if (is_bf16)
    return cross_entropy(static_cast<bf16*>(logits), labels, losses, rows, width, ignored, with_gradient, threads);
  return cross_entropy(static_cast<float*>(logits), labels, losses, rows, width, ignored, with_gradient, threads);
}
