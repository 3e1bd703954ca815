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
#include "attention_amx.h"
#include "attention_portable.h"

namespace {

// A path computes tiles: Portable everywhere, Amx in bf16 where the CPU has matrix units. What follows is the same for both.
template <class Path>
void forward(const Attention& a) {
  const Sizes z(a);
  const int threads = int(a.threads);
  const long group = a.heads / a.kv_heads, keys_floats = Path::keys_floats(z);
  float *keys = a.workspace, *scratches = keys + a.batch * a.kv_heads * keys_floats;
  auto scratch_of = [&](int thread) { return scratches + thread * Path::forward_scratch(z); };
  parallel_for(threads, a.batch * a.kv_heads * z.tiles, [&](long task, int thread) {
    const long tile = task % z.tiles, head = task / z.tiles;
    Path::pack_keys(a, z, head / a.kv_heads, head % a.kv_heads, tile, keys + head * keys_floats, scratch_of(thread));
  });
  const long query_tiles = z.tiles - z.first / TILE;
  parallel_for(threads, a.batch * a.heads * query_tiles, [&](long task, int thread) {
    const long tile = z.tiles - 1 - task % query_tiles, head = task / query_tiles, b = head / a.heads, h = head % a.heads;
    Path::enter(z);
    Path::forward_tile(a, z, b, h, tile, keys + (b * a.kv_heads + h / group) * keys_floats, scratch_of(thread));
    Path::leave();
  });
}

// With enough heads a task is a head, and each pair of tiles is visited once. With few, a task is a tile: queries and keys then
// take a pass each. Both add the same numbers in the same order.
bool tasks_are_heads(const Attention& a) { return a.threads == 1 || a.batch * a.heads >= 2 * a.threads; }
// A slot belongs to a thread, or to a head if another task needs what is in it.
long num_slots(const Attention& a) { return tasks_are_heads(a) ? a.threads : a.batch * a.heads; }
bool keeps_grads(const Attention& a) { return !tasks_are_heads(a) || a.heads > a.kv_heads; }
long num_grads(const Attention& a) { return keeps_grads(a) ? a.batch * a.heads : a.threads; }

template <class Path>
void backward(const Attention& a) {
  const Sizes z(a);
  const int threads = int(a.threads);
  const long heads = a.batch * a.heads;
  float *scratches = a.workspace, *slots = scratches + threads * Path::backward_scratch(z);
  float* all_grads = slots + num_slots(a) * Path::head_floats(z);
  auto scratch_of = [&](int thread) { return scratches + thread * Path::backward_scratch(z); };
  auto slot_of = [&](long head, int thread) { return slots + (tasks_are_heads(a) ? thread : head) * Path::head_floats(z); };
  auto grads_of = [&](long head, int thread) { return all_grads + (keeps_grads(a) ? head : thread) * Path::grads_floats(z); };

  if (tasks_are_heads(a)) {
    parallel_for(threads, heads, [&](long head, int thread) {
      const long b = head / a.heads, h = head % a.heads;
      float *slot = slot_of(head, thread), *grads = grads_of(head, thread), *scratch = scratch_of(thread);
      Path::pack_head(a, z, b, h, slot, grads, scratch);
      Path::enter(z);
      for (long keys = 0; keys < z.tiles; ++keys)
        for (long tile = keys; tile < z.tiles; ++tile)
          Path::template backward_pair<true, true>(a, z, b, tile, keys, slot, grads, scratch);
      Path::leave();
      for (long tile = 0; tile < z.tiles; ++tile) Path::finish_queries(a, z, b, h, tile, slot, scratch);
      if (!keeps_grads(a))
        for (long tile = 0; tile < z.tiles; ++tile) Path::finish_keys(a, z, b, h, tile, grads);
    });
  } else {
    parallel_for(threads, heads, [&](long head, int thread) {
      Path::pack_head(a, z, head / a.heads, head % a.heads, slot_of(head, thread), grads_of(head, thread), scratch_of(thread));
    });
    parallel_for(threads, 2 * heads * z.tiles, [&](long task, int thread) {
      const long tile = task / 2 % z.tiles, head = task / 2 / z.tiles, b = head / a.heads;
      float *slot = slot_of(head, thread), *grads = grads_of(head, thread), *scratch = scratch_of(thread);
      Path::enter(z);
      if (task % 2) {
        for (long other = tile; other < z.tiles; ++other)
          Path::template backward_pair<false, true>(a, z, b, other, tile, slot, grads, scratch);
      } else {
        for (long keys = 0; keys <= tile; ++keys)
          Path::template backward_pair<true, false>(a, z, b, tile, keys, slot, grads, scratch);
        Path::finish_queries(a, z, b, head % a.heads, tile, slot, scratch);
      }
      Path::leave();
    });
  }
  if (keeps_grads(a))
    parallel_for(threads, a.batch * a.kv_heads * z.tiles, [&](long task, int) {
      const long tile = task % z.tiles, kv = task / z.tiles, b = kv / a.kv_heads, g = kv % a.kv_heads;
      Path::finish_keys(a, z, b, g, tile, grads_of(b * a.heads + g * (a.heads / a.kv_heads), 0));
    });
}

template <class Path>
long workspace_floats(const Attention& a, bool is_backward) {
  const Sizes z(a);
  if (!is_backward) return a.batch * a.kv_heads * Path::keys_floats(z) + a.threads * Path::forward_scratch(z);
  return a.threads * Path::backward_scratch(z) + num_slots(a) * Path::head_floats(z) + num_grads(a) * Path::grads_floats(z);
}

// Calls f(path) with the path that this call takes.
template <class F>
auto dispatch(const Attention& a, F f) {
#ifdef DRUMLINE_AMX
  if (a.is_bf16 && amx_is_permitted()) return f(Amx{});
#endif
  return a.is_bf16 ? f(Portable<bf16>{}) : f(Portable<float>{});
}

}  // namespace

// Bytes of workspace that a call needs, aligned to 64.
extern "C" int64_t drumline_attention_workspace(const Attention* a, int is_backward) {
  return 4 * dispatch(*a, [&](auto path) { return workspace_floats<decltype(path)>(*a, is_backward); });
}

extern "C" void drumline_attention_forward(const Attention* a) {
  dispatch(*a, [&](auto path) { forward<decltype(path)>(*a); });
}

extern "C" void drumline_attention_backward(const Attention* a) {
  dispatch(*a, [&](auto path) { backward<decltype(path)>(*a); });
}
