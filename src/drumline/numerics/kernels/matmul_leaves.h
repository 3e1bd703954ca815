// C = sum over leaves, up a binary tree, of products: leaf = sum_s A_s B_s^T, one segment after the other.
//
// A tile of C at a time, so that the tree's partial sums stay in the cache. The tree is that of drumline.numerics.tree;
// its additions are of fp32, elementwise, so that tiles change no bit. Included by matmul.cpp, whose products a leaf is made of.
#pragma once

// One product of a leaf, as ctypes fills it: strides in elements, one of a matrix's two is 1.
extern "C" struct Segment {
  const void *a, *b;
  int64_t k, a_row, a_k, b_row, b_k;
};

extern "C" struct Leaves {
  int64_t m, n, leaves, segments, is_bf16, out_is_bf16, threads;
  const Segment* at;  // [leaves][segments]
  void* out;          // [m, n]
  void* workspace;    // drumline_matmul_leaves_workspace bytes
};

namespace {

constexpr long TILE_ROWS = 512, TILE_COLUMNS = 256;

struct Tile {
  long row, column, rows, columns;
};

long depth(const Leaves& s) {
  long depth = 1;
  while ((1L << (depth - 1)) < s.leaves) ++depth;
  return depth;
}
// A single product goes straight to its place.
bool is_single(const Leaves& s) { return s.leaves == 1 && (s.segments == 1 || !s.out_is_bf16); }
Tile first_tile(const Leaves& s) {
  return is_single(s) ? Tile{0, 0, s.m, s.n} : Tile{0, 0, smaller(TILE_ROWS, s.m), smaller(TILE_COLUMNS, s.n)};
}
long partials_bytes(const Leaves& s) { return is_single(s) ? 0 : 4 * depth(s) * TILE_ROWS * TILE_COLUMNS; }

Product product_of(const Leaves& s, const Segment& of, const Tile& tile) {
  const long bytes = s.is_bf16 ? 2 : 4;
  Product p{};
  p.m = tile.rows, p.n = tile.columns, p.k = of.k, p.is_bf16 = s.is_bf16, p.threads = s.threads;
  p.a = static_cast<const char*>(of.a) + tile.row * of.a_row * bytes;
  p.b = static_cast<const char*>(of.b) + tile.column * of.b_row * bytes;
  p.a_row = of.a_row, p.a_k = of.a_k, p.b_row = of.b_row, p.b_k = of.b_k;
  return p;
}

template <class To>
void copy_tile(const float* from, const Tile& tile, To* out, long width) {
  for (long r = 0; r < tile.rows; ++r)
    for_vectors(tile.columns, [&](long i, int n) {
      store_lanes(out + (tile.row + r) * width + tile.column + i, load_lanes(from + r * tile.columns + i, n), n);
    });
}

}  // namespace

extern "C" void drumline_matmul(const Product* p);
extern "C" int64_t drumline_matmul_workspace(const Product* p);

extern "C" int64_t drumline_matmul_leaves_workspace(const Leaves* s) {
  int64_t most = 0;
  for (long i = 0; i < s->segments; ++i) {
    const Product p = product_of(*s, s->at[i], first_tile(*s));
    const int64_t bytes = drumline_matmul_workspace(&p);
    most = bytes > most ? bytes : most;
  }
  return partials_bytes(*s) + most;
}

extern "C" void drumline_matmul_leaves(const Leaves* s) {
  float* partials = static_cast<float*>(s->workspace);
  auto leaf_into = [&](long leaf, const Tile& tile, void* to, bool is_bf16) {
    for (long i = 0; i < s->segments; ++i) {
      Product p = product_of(*s, s->at[leaf * s->segments + i], tile);
      p.workspace = static_cast<char*>(s->workspace) + partials_bytes(*s);
      p.start = i ? static_cast<const float*>(to) : nullptr;
      p.out = to, p.out_is_bf16 = is_bf16;
      drumline_matmul(&p);
    }
  };
  if (is_single(*s)) return leaf_into(0, first_tile(*s), s->out, s->out_is_bf16);
  for (long row = 0; row < s->m; row += TILE_ROWS)
    for (long column = 0; column < s->n; column += TILE_COLUMNS) {
      const Tile tile{row, column, smaller(TILE_ROWS, s->m - row), smaller(TILE_COLUMNS, s->n - column)};
      const long count = tile.rows * tile.columns;
      long held = 0;
      auto join = [&] {
        float *left = partials + (held - 2) * TILE_ROWS * TILE_COLUMNS, *right = left + TILE_ROWS * TILE_COLUMNS;
        for (long i = 0; i < count; ++i) left[i] += right[i];
        --held;
      };
      for (long leaf = 0; leaf < s->leaves; ++leaf) {
        leaf_into(leaf, tile, partials + held++ * TILE_ROWS * TILE_COLUMNS, false);
        for (long joined = leaf; joined & 1; joined >>= 1) join();
      }
      while (held > 1) join();
      if (s->out_is_bf16)
        copy_tile(partials, tile, static_cast<bf16*>(s->out), s->n);
      else
        copy_tile(partials, tile, static_cast<float*>(s->out), s->n);
    }
}
