// AdamW with decoupled decay, in one pass over parameter, gradient and both moments.
//
//   m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2;  w = w decay - rate m / (sqrt(v) / root2 + eps)
//
// decay = 1 - lr weight_decay, rate = lr / (1 - beta1^t), root2 = sqrt(1 - beta2^t). Loshchilov and Hutter 2019,
// arXiv:1711.05101, algorithm 2. Every element takes the same vector arithmetic, also those left over at the end, so that its
// bits depend on neither how a tensor is cut nor the threads.
#include "parallel.h"
#include "simd.h"

extern "C" struct AdamW {
  float *param;
  const float *grad;
  float *first, *second;
  int64_t count, threads;
  float decay, take1, keep2, take2, rate, root2, eps;
};

namespace {

constexpr long PIECE = 1 << 14;

INLINE vec root(vec x) {
  for (int lane = 0; lane < LANES; ++lane) x[lane] = std::sqrt(x[lane]);
  return x;
}

// Not inlined, so that full vectors and the last one are computed by the same instructions.
__attribute__((noinline)) void move(const AdamW& a, long first, long n) {
  float *w = a.param + first, *m = a.first + first, *v = a.second + first;
  const float* g = a.grad + first;
  float tail[4][LANES] = {};
  for (long i = 0; i < n; i += LANES) {
    const bool whole = i + LANES <= n;
    const long left = whole ? LANES : n - i;
    float *wi = w + i, *mi = m + i, *vi = v + i;
    const float* gi = g + i;
    if (!whole) {
      std::memcpy(tail[0], wi, 4 * left), std::memcpy(tail[1], mi, 4 * left);
      std::memcpy(tail[2], vi, 4 * left), std::memcpy(tail[3], gi, 4 * left);
      wi = tail[0], mi = tail[1], vi = tail[2], gi = tail[3];
    }
    const vec grad = load(gi), one = load(mi) + splat(a.take1) * (grad - load(mi));
    const vec two = load(vi) * splat(a.keep2) + splat(a.take2) * (grad * grad);
    store(mi, one);
    store(vi, two);
    store(wi, load(wi) * splat(a.decay) - splat(a.rate) * (one / (root(two) / splat(a.root2) + splat(a.eps))));
    if (!whole) {
      std::memcpy(w + i, tail[0], 4 * left), std::memcpy(m + i, tail[1], 4 * left), std::memcpy(v + i, tail[2], 4 * left);
    }
  }
}

}  // namespace

extern "C" void drumline_adamw(const AdamW* a) {
  parallel_for(int(a->threads), (a->count + PIECE - 1) / PIECE, [=](long task, int) {
    const long first = task * PIECE, left = a->count - first;
    move(*a, first, left < PIECE ? left : PIECE);
  });
}
