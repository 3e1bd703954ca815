// RMSNorm and SwiGLU, forward and backward, each in one pass over memory.
//
//   RMSNorm:  y = x r w,  r = 1 / sqrt(mean(x^2) + eps);     dx = r (w dy) - x r^3 mean(w dy x),  dw = sum_rows dy x r
//   SwiGLU:   h = silu(g) u,  silu(g) = g s,  s = 1 / (1 + e^-g);     dg = dh u s (1 + g (1 - s)),  du = dh silu(g)
//
// Arithmetic is fp32 whatever the elements are. A row is one task's, and dw is summed over blocks of 64 rows and then over
// blocks, in order: bits depend on neither the threads nor the other rows of a block.
#include "parallel.h"
#include "simd.h"

namespace {

constexpr long ROWS = 64;    // of a task
constexpr long PIECE = 8192;  // elements of an elementwise task

template <class Element>
void norm_forward(const Element* x, const float* weight, Element* y, float* scale, long rows, long width, float eps, int threads) {
  parallel_for(threads, (rows + ROWS - 1) / ROWS, [=](long task, int) {
    for (long row = task * ROWS; row < rows && row < (task + 1) * ROWS; ++row) {
      const Element* in = x + row * width;
      Element* out = y + row * width;
      vec squares[4] = {};
      long i = 0;
      for (; i + 4 * LANES <= width; i += 4 * LANES)
        for (int n = 0; n < 4; ++n) {
          const vec v = load_lanes(in + i + n * LANES);
          squares[n] += v * v;
        }
      for_vectors(width - i, [&](long j, int count) {
        const vec v = load_lanes(in + i + j, count);
        squares[0] += v * v;
      });
      const float sum = sum_of_lanes((squares[0] + squares[1]) + (squares[2] + squares[3]));
      const float r = 1.0f / std::sqrt(sum / float(width) + eps);
      scale[row] = r;
      for_vectors(width, [&](long j, int count) {
        store_lanes(out + j, load_lanes(in + j, count) * splat(r) * load_lanes(weight + j, count), count);
      });
    }
  });
}

// partials: [ceil(rows / ROWS), width], work space.
template <class Element>
void norm_backward(const Element* grad, const Element* x, const float* weight, const float* scale, Element* grad_x,
                   float* grad_weight, float* partials, long rows, long width, int threads) {
  const long blocks = (rows + ROWS - 1) / ROWS;
  parallel_for(threads, blocks, [=](long block, int) {
    float* partial = partials + block * width;
    std::memset(partial, 0, sizeof(float) * width);
    for (long row = block * ROWS; row < rows && row < (block + 1) * ROWS; ++row) {
      const Element *in = x + row * width, *dy = grad + row * width;
      Element* dx = grad_x + row * width;
      const vec r = splat(scale[row]);
      vec dots{};
      for_vectors(width, [&](long j, int count) {
        const vec v = load_lanes(in + j, count), d = load_lanes(dy + j, count);
        dots += d * load_lanes(weight + j, count) * v;
        store_lanes(partial + j, load_lanes(partial + j, count) + d * (v * r), count);
      });
      const vec shift = r * r * splat(sum_of_lanes(dots) / float(width));
      for_vectors(width, [&](long j, int count) {
        const vec v = load_lanes(in + j, count), wd = load_lanes(dy + j, count) * load_lanes(weight + j, count);
        store_lanes(dx + j, r * (wd - v * shift), count);
      });
    }
  });
  std::memset(grad_weight, 0, sizeof(float) * width);
  for (long block = 0; block < blocks; ++block)
    for (long j = 0; j < width; ++j) grad_weight[j] += partials[block * width + j];
}

INLINE vec sigmoid(vec x) {
  const vec limit = splat(126.0f), y = x * splat(-1.44269504088896341f);
  return splat(1.0f) / (splat(1.0f) + exp2_of(y > limit ? limit : y));  // this order keeps a NaN
}

template <class Element>
void swiglu_forward(const Element* gate, const Element* up, Element* y, long n, int threads) {
  parallel_for(threads, (n + PIECE - 1) / PIECE, [=](long task, int) {
    const long first = task * PIECE;
    for_vectors(n - first < PIECE ? n - first : PIECE, [&](long i, int count) {
      const vec g = load_lanes(gate + first + i, count), u = load_lanes(up + first + i, count);
      store_lanes(y + first + i, g * sigmoid(g) * u, count);
    });
  });
}

template <class Element>
void swiglu_backward(const Element* grad, const Element* gate, const Element* up, Element* grad_gate, Element* grad_up, long n,
                     int threads) {
  parallel_for(threads, (n + PIECE - 1) / PIECE, [=](long task, int) {
    const long first = task * PIECE;
    for_vectors(n - first < PIECE ? n - first : PIECE, [&](long i, int count) {
      const vec d = load_lanes(grad + first + i, count), g = load_lanes(gate + first + i, count);
      const vec u = load_lanes(up + first + i, count), s = sigmoid(g), one = splat(1.0f);
      store_lanes(grad_gate + first + i, d * u * (s * (one + g * (one - s))), count);
      store_lanes(grad_up + first + i, d * (g * s), count);
    });
  });
}

template <class Element>
const Element* as(const void* p) {
  return static_cast<const Element*>(p);
}
template <class Element>
Element* as(void* p) {
  return static_cast<Element*>(p);
}

}  // namespace

extern "C" void drumline_norm_forward(const void* x, const float* weight, void* y, float* scale, int64_t rows, int64_t width,
                                      float eps, int is_bf16, int threads) {
  if (is_bf16)
    norm_forward(as<bf16>(x), weight, as<bf16>(y), scale, rows, width, eps, threads);
  else
    norm_forward(as<float>(x), weight, as<float>(y), scale, rows, width, eps, threads);
}

extern "C" int64_t drumline_norm_partials(int64_t rows, int64_t width) { return (rows + ROWS - 1) / ROWS * width; }

extern "C" void drumline_norm_backward(const void* grad, const void* x, const float* weight, const float* scale, void* grad_x,
                                       float* grad_weight, float* partials, int64_t rows, int64_t width, int is_bf16,
                                       int threads) {
  if (is_bf16)
    norm_backward(as<bf16>(grad), as<bf16>(x), weight, scale, as<bf16>(grad_x), grad_weight, partials, rows, width, threads);
  else
    norm_backward(as<float>(grad), as<float>(x), weight, scale, as<float>(grad_x), grad_weight, partials, rows, width, threads);
}

extern "C" void drumline_swiglu_forward(const void* gate, const void* up, void* y, int64_t n, int is_bf16, int threads) {
  if (is_bf16)
    swiglu_forward(as<bf16>(gate), as<bf16>(up), as<bf16>(y), n, threads);
  else
    swiglu_forward(as<float>(gate), as<float>(up), as<float>(y), n, threads);
}

extern "C" void drumline_swiglu_backward(const void* grad, const void* gate, const void* up, void* grad_gate, void* grad_up,
                                         int64_t n, int is_bf16, int threads) {
  if (is_bf16)
    swiglu_backward(as<bf16>(grad), as<bf16>(gate), as<bf16>(up), as<bf16>(grad_gate), as<bf16>(grad_up), n, threads);
  else
    swiglu_backward(as<float>(grad), as<float>(gate), as<float>(up), as<float>(grad_gate), as<float>(grad_up), n, threads);
}
