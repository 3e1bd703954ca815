// Products of bf16 on Intel's matrix units: tiles of 16 x 16 sums, 32 products a step, fp32 accumulators.
//
// The order within a step is the unit's own and the same for every element of a tile. Source: Intel 64 and IA-32
// Architectures Software Developer's Manual, TDPBF16PS.
#pragma once

#include "matmul_portable.h"

#if defined(__AMX_BF16__) && defined(__AMX_TILE__) && defined(__linux__) && defined(__AVX512F__)
#define DRUMLINE_AMX
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace {

// Linux lends the tile registers to a process that asks.
inline bool amx_is_permitted() {
  constexpr int REQUEST = 0x1023, TILE_DATA = 18;
  static const bool granted = syscall(SYS_arch_prctl, REQUEST, TILE_DATA) == 0;
  return granted;
}

struct Amx {
  using Element = bf16;
  static constexpr long ROWS = 32, SMALLEST = 16, STEPS = 512, STEP = 32, TILE_BYTES = 1024;
  static constexpr double CYCLES = 1.0 / 512;
  static constexpr long BYTES_OF_LANES = 2 * (STEPS / STEP) * TILE_BYTES, BYTES_OF_ROWS = BYTES_OF_LANES;

  static void enter() {
    alignas(64) struct {
      uint8_t palette = 1, start = 0, reserved[14] = {};
      uint16_t bytes[16] = {};
      uint8_t rows[16] = {};
    } config;
    for (int tile = 0; tile < 8; ++tile) config.bytes[tile] = 64, config.rows[tile] = 16;
    _tile_loadconfig(&config);
  }
  static void leave() { _tile_release(); }

  // Sixteen rows by 32 k, as pairs of k: square[row][pair], or transposed where k is strided.
  static void load_square(const Side<bf16>& side, const bf16* from, int rows, int steps, uvec* square) {
    if (side.k_stride == 1) {
      for (int r = 0; r < 16; ++r) {
        square[r] = uvec{};
        if (r < rows) std::memcpy(&square[r], from + r * side.row_stride, 2 * steps);
      }
      return;
    }
    for (int pair = 0; pair < 16; ++pair) {
      hvec low{}, high{};
      if (2 * pair < steps) std::memcpy(&low, from + 2 * pair * side.k_stride, 2 * rows);
      if (2 * pair + 1 < steps) std::memcpy(&high, from + (2 * pair + 1) * side.k_stride, 2 * rows);
      square[pair] = __builtin_convertvector(low, uvec) | (__builtin_convertvector(high, uvec) << 16);
    }
  }

  // Tiles of rows [row][pair] (by_rows) or of lanes [pair][lane]; two neighbours lie in a group, each with all its steps.
  static void pack(const Side<bf16>& side, long first, long count, long k0, long steps, char* to, bool by_rows) {
    const bf16* from = side.at + first * side.row_stride + k0 * side.k_stride;
    auto one = [&](long row, long k) {
      uvec square[16];
      load_square(side, from + row * side.row_stride + k * side.k_stride, left(count - row), int(smaller(STEP, steps - k)), square);
      if ((side.k_stride == 1) != by_rows) transpose_square(square);
      std::memcpy(to + (row / 16 * (STEPS / STEP) + k / STEP) * TILE_BYTES, square, TILE_BYTES);
    };
    if (side.k_stride == 1)
      for (long row = 0; row < count; row += 16)
        for (long k = 0; k < steps; k += STEP) one(row, k);
    else
      for (long k = 0; k < steps; k += STEP)
        for (long row = 0; row < count; row += 16) one(row, k);
  }
  static void pack_rows(const Side<bf16>& side, long first, long count, long k0, long steps, char* to) {
    pack(side, first, count, k0, steps, to, true);
  }
  static void pack_lanes(const Side<bf16>& side, long first, long count, long k0, long steps, char* to) {
    pack(side, first, count, k0, steps, to, false);
  }

  template <bool TWO_ROWS, bool TWO_LANES>
  static void accumulate(const char* a, const char* b, float* c, long ld, long steps) {
    constexpr long HALF = STEPS / STEP * TILE_BYTES;
    const long bytes = 4 * ld;
    _tile_loadd(0, c, bytes);
    if constexpr (TWO_LANES) _tile_loadd(1, c + 16, bytes);
    if constexpr (TWO_ROWS) _tile_loadd(2, c + 16 * ld, bytes);
    if constexpr (TWO_ROWS && TWO_LANES) _tile_loadd(3, c + 16 * ld + 16, bytes);
    for (long k = 0; k < steps; k += STEP, a += TILE_BYTES, b += TILE_BYTES) {
      _tile_loadd(4, a, 64);
      _tile_loadd(6, b, 64);
      _tile_dpbf16ps(0, 4, 6);
      if constexpr (TWO_LANES) {
        _tile_loadd(7, b + HALF, 64);
        _tile_dpbf16ps(1, 4, 7);
      }
      if constexpr (TWO_ROWS) {
        _tile_loadd(5, a + HALF, 64);
        _tile_dpbf16ps(2, 5, 6);
        if constexpr (TWO_LANES) _tile_dpbf16ps(3, 5, 7);
      }
    }
    _tile_stored(0, c, bytes);
    if constexpr (TWO_LANES) _tile_stored(1, c + 16, bytes);
    if constexpr (TWO_ROWS) _tile_stored(2, c + 16 * ld, bytes);
    if constexpr (TWO_ROWS && TWO_LANES) _tile_stored(3, c + 16 * ld + 16, bytes);
  }

  static void multiply(const Side<bf16>&, const char* a, const char* b, float* c, long ld, int rows, long lanes, long steps) {
    if (rows > 16)
      lanes > 16 ? accumulate<true, true>(a, b, c, ld, steps) : accumulate<true, false>(a, b, c, ld, steps);
    else
      lanes > 16 ? accumulate<false, true>(a, b, c, ld, steps) : accumulate<false, false>(a, b, c, ld, steps);
  }
};

}  // namespace
#endif
