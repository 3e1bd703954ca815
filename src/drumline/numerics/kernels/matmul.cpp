// C[m, n] = start[m, n] + sum_k A[m, k] B[n, k], where a sum's order is fixed by K alone.
//
// Each element of C belongs to one lane of one accumulator, which adds the products one after the other, k ascending, with one
// rounding a step (a fused multiply-add); on AMX a step is 32 products in the order of the tile unit. Blocks of k only say
// when an accumulator is put aside. So bits depend on no other row or column, on no blocking, and on no thread, and a sum over k
// may be cut anywhere (AMX: at multiples of 32) and gone on with through `start`.
//
// Blocking after Goto & van de Geijn 2008, "Anatomy of high-performance matrix multiplication". One side of the product lies in
// vector lanes and is packed transposed, the other is broadcast; which is which is a matter of speed alone.
#include "matmul_amx.h"
#include "matmul_portable.h"
#include "parallel.h"

// The call, as ctypes fills it. Strides are in elements; one of a matrix's two is 1.
extern "C" struct Product {
  int64_t m, n, k, is_bf16, out_is_bf16, threads;
  const void *a, *b;
  int64_t a_row, a_k, b_row, b_k;
  const float* start;  // [m, n] or null: zero
  void* out;           // [m, n]
  void* workspace;     // drumline_matmul_workspace bytes
};

namespace {

constexpr long ROW_BLOCK = 512, LANE_BLOCK = 256;  // of a task's part of C, kept in the cache

// One orientation of the call: `rows` are broadcast, `lanes` lie in vectors; swapped: C is written transposed.
template <class Element>
struct Plan {
  Side<Element> rows, lanes;
  bool swapped;
  long k, row_block, lane_block, row_tasks, lane_tasks;
};

template <class Unit>
double cycles(const Side<typename Unit::Element>& rows, const Side<typename Unit::Element>& lanes) {
  const double padded = double(round_to(lanes.count, LANES)), blocks = double((rows.count + ROW_BLOCK - 1) / ROW_BLOCK);
  const double packs = (lanes.k_stride == 1 ? 0.35 : 0.1) * blocks * double(lanes.count);
  return double(round_to(rows.count, Unit::SMALLEST)) * padded * Unit::CYCLES + packs;
}

inline long even_blocks(long count, long largest, long unit, long at_least) {
  long blocks = (count + largest - 1) / largest;
  if (blocks < at_least) blocks = at_least;
  const long size = round_to((count + blocks - 1) / blocks, unit);
  return size < largest ? size : largest;
}

template <class Unit>
Plan<typename Unit::Element> plan(const Product& p) {
  using E = typename Unit::Element;
  Plan<E> made;
  const Side<E> a{static_cast<const E*>(p.a), p.m, p.a_row, p.a_k}, b{static_cast<const E*>(p.b), p.n, p.b_row, p.b_k};
  made.swapped = cycles<Unit>(b, a) < cycles<Unit>(a, b);
  made.rows = made.swapped ? b : a, made.lanes = made.swapped ? a : b, made.k = p.k;
  const long largest_rows = ROW_BLOCK / Unit::ROWS * Unit::ROWS;
  made.lane_block = even_blocks(made.lanes.count, LANE_BLOCK, PANEL, 1);
  made.lane_tasks = (made.lanes.count + made.lane_block - 1) / made.lane_block;
  const long wanted = p.threads == 1 ? 1 : (4 * p.threads + made.lane_tasks - 1) / made.lane_tasks;
  const long possible = made.rows.count / 128 + 1;
  made.row_block = even_blocks(made.rows.count, largest_rows, Unit::ROWS, wanted < possible ? wanted : possible);
  made.row_tasks = (made.rows.count + made.row_block - 1) / made.row_block;
  return made;
}

// Between a task's part of C and its rows in memory, [m, n]; rows of the buffer are LANE_BLOCK apart.
template <class To>
void write(const Product& p, bool swapped, const float* buffer, long row0, long rows, long lane0, long lanes) {
  To* out = static_cast<To*>(p.out);
  if (!swapped) {
    for (long r = 0; r < rows; ++r)
      for_vectors(lanes, [&](long l, int count) {
        store_lanes(out + (row0 + r) * p.n + lane0 + l, load_lanes(buffer + r * LANE_BLOCK + l, count), count);
      });
    return;
  }
  for (long r = 0; r < rows; r += LANES)
    for (long l = 0; l < lanes; l += LANES)
      transpose_block(buffer + r * LANE_BLOCK + l, LANE_BLOCK, out + (lane0 + l) * p.n + row0 + r, p.n, left(rows - r),
                      left(lanes - l), false);
}
void begin(const Product& p, bool swapped, float* buffer, long row0, long rows, long lane0, long lanes, long padded_rows) {
  std::memset(buffer, 0, sizeof(float) * LANE_BLOCK * padded_rows);
  if (!p.start) return;
  if (!swapped) {
    for (long r = 0; r < rows; ++r)
      std::memcpy(buffer + r * LANE_BLOCK, p.start + (row0 + r) * p.n + lane0, sizeof(float) * lanes);
    return;
  }
  for (long l = 0; l < lanes; l += LANES)
    for (long r = 0; r < rows; r += LANES)
      transpose_block(p.start + (lane0 + l) * p.n + row0 + r, p.n, buffer + r * LANE_BLOCK + l, LANE_BLOCK, left(lanes - l),
                      left(rows - r), false);
}

template <class Unit>
long thread_bytes() {
  return 4 * ROW_BLOCK * LANE_BLOCK + Unit::BYTES_OF_LANES * (LANE_BLOCK / PANEL) + Unit::BYTES_OF_ROWS * (ROW_BLOCK / Unit::ROWS);
}

template <class Unit>
void multiply(const Product& p) {
  const auto made = plan<Unit>(p);
  parallel_for(int(p.threads), made.row_tasks * made.lane_tasks, [&](long task, int thread) {
    char* work = static_cast<char*>(p.workspace) + thread * thread_bytes<Unit>();
    float* buffer = reinterpret_cast<float*>(work);
    char* packed_lanes = work + 4 * ROW_BLOCK * LANE_BLOCK;
    char* packed_rows = packed_lanes + Unit::BYTES_OF_LANES * (LANE_BLOCK / PANEL);
    const long row0 = task / made.lane_tasks * made.row_block, lane0 = task % made.lane_tasks * made.lane_block;
    const long rows = smaller(made.row_block, made.rows.count - row0), lanes = smaller(made.lane_block, made.lanes.count - lane0);
    begin(p, made.swapped, buffer, row0, rows, lane0, lanes, smaller(round_to(rows, Unit::ROWS), ROW_BLOCK));
    Unit::enter();
    for (long k0 = 0; k0 < made.k; k0 += Unit::STEPS) {
      const long steps = smaller(Unit::STEPS, made.k - k0);
      Unit::pack_lanes(made.lanes, lane0, lanes, k0, steps, packed_lanes);
      Unit::pack_rows(made.rows, row0, rows, k0, steps, packed_rows);
      for (long l = 0; l < lanes; l += PANEL)
        for (long r = 0; r < rows; r += Unit::ROWS)
          Unit::multiply(made.rows, packed_rows + r / Unit::ROWS * Unit::BYTES_OF_ROWS,
                         packed_lanes + l / PANEL * Unit::BYTES_OF_LANES, buffer + r * LANE_BLOCK + l, LANE_BLOCK,
                         int(smaller(Unit::ROWS, rows - r)), smaller(PANEL, lanes - l), steps);
    }
    Unit::leave();
    if (p.out_is_bf16)
      write<bf16>(p, made.swapped, buffer, row0, rows, lane0, lanes);
    else
      write<float>(p, made.swapped, buffer, row0, rows, lane0, lanes);
  });
}

// Calls f(unit) with the unit that takes this call.
template <class F>
auto dispatch(const Product& p, F f) {
#ifdef DRUMLINE_AMX
  if (p.is_bf16 && amx_is_permitted()) return f(Amx{});
#endif
  return p.is_bf16 ? f(Portable<bf16>{}) : f(Portable<float>{});
}

}  // namespace

// Whether products of bf16 run on matrix units here.
extern "C" int drumline_matmul_has_amx() {
#ifdef DRUMLINE_AMX
  return amx_is_permitted();
#else
  return 0;
#endif
}

extern "C" int64_t drumline_matmul_workspace(const Product* p) {
  return p->threads * dispatch(*p, [](auto unit) { return thread_bytes<decltype(unit)>(); });
}

extern "C" void drumline_matmul(const Product* p) {
  dispatch(*p, [&](auto unit) { multiply<decltype(unit)>(*p); });
}

#include "matmul_leaves.h"
