#pragma once

// The gradient's small kernels: the chunk of each slot, and the sums over chunks of the gate's parameters.

#include "furlong/ops/kda/cuda/backward_chunk.cuh"

namespace furlong::kda::cuda {

/// d_dt_bias and d_a_log: sums of the chunks' parts in a fixed order. 1024 threads; y = 0, 1: half the channels of
/// d_dt_bias, y = 2: d_a_log.
template <int kD>
FURLONG_KERNEL void gradient_gate_sums(const BackwardArgs args, const GradientWork work) {
  float* sums = reinterpret_cast<float*>(shared_memory());
  const int tid = thread_index(), h = block_index_x(), heads = static_cast<int>(args.in.heads);
  const bool bias = block_index_y() < 2;
  const int lanes = bias ? kD / 2 : kD, lane = tid % lanes, offset = (bias ? block_index_y() * kD / 2 : kD) + lane;
  const int step = block_size_x() / lanes;
  float sum = 0.0f;
  constexpr int kBatch = 8;
  for (int start = tid / lanes; start < work.slots; start += kBatch * step) {
    float part[kBatch];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int slot = start + i * step;
      const bool used = slot < work.slots && work.table_X[slot].rows > 0;
      part[i] = used ? work.partial[(static_cast<int64_t>(slot) * heads + h) * 2 * kD + offset] : 0.0f;
    }
#pragma unroll
    for (int i = 0; i < kBatch; ++i) sum += part[i];
  }
  sums[tid] = sum;
  sync_block();
  if (tid < lanes) {
    for (int other = 1; other < step; ++other) sum += sums[other * lanes + tid];
    if (bias) args.d_dt_bias_HK[h * kD + offset] = sum;
    sums[tid] = sum;
  }
  sync_block();
  if (tid == 0 && !bias) {
    float total = 0.0f;
    for (int d = 0; d < kD; ++d) total += sums[d];
    args.d_a_log_H[h] = total;
  }
}

/// The chunk of each slot: the sequence is the last one whose first slot is not past it.
FURLONG_KERNEL void gradient_table(const BackwardArgs args, const GradientWork work) {
  const int slot = block_index_x() * block_size_x() + thread_index();
  if (slot >= work.slots) return;
  work.table_X[slot] = {0, 0, 0};
  if (args.in.sequences == 0) return;
  int64_t low = 0, high = args.in.sequences - 1;
  while (low < high) {
    const int64_t middle = (low + high + 1) / 2;
    if (slot_of(args.in.offsets[middle], middle, 0) <= slot) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  const int64_t begin = args.in.offsets[low], end = args.in.offsets[low + 1];
  const int64_t first = begin + (slot - slot_of(begin, low, 0)) * kGradientChunk;
  const int64_t left = end - first;
  const int rows = left <= 0 ? 0 : left < kGradientChunk ? static_cast<int>(left) : kGradientChunk;
  work.table_X[slot] = {first, rows, static_cast<int>(low)};
}

}  // namespace furlong::kda::cuda
