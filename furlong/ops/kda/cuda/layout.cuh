#pragma once

// Shared memory and division of labour of the fused forward kernel.
//
// A block walks the chunks of one (sequence, segment, head, 128 value columns):
//   warps 0-3         recurrence: one warpgroup, the state stays in its registers in fp32
//   then groups of 4  group i prepares chunks i, i + kGroups, ...: what does not depend on the state
// Chunks pass through a ring of stages. Named barriers: full[s] (a preparing group arrives, the recurrence waits) and
// empty[s] (the other way round).

#include "furlong/ops/kda/cuda/args.h"
#include "furlong/ops/kda/cuda/primitives.cuh"

namespace furlong::kda::cuda {

inline constexpr int kHead = 128;                    // key size, and value columns of a block
inline constexpr int kGroup = 128;                   // threads of the recurrence and of each preparing group
inline constexpr int kRowBytes = kHead * 2;          // a bf16 row
inline constexpr int kTile = kChunk * kRowBytes;     // a bf16 operand of a chunk: 8 KB
inline constexpr int kHalfTile = kTile / 2;          // 64 columns of it
inline constexpr int kSquare = kChunk * kChunk * 2;  // a 32 x 32 bf16 matrix: 2 KB
inline constexpr int kScoreRow = kChunk + 4;         // floats; rows stay 16-byte aligned
inline constexpr int kCornerRow = 20;                // floats; rows of a 16 x 16 block

/// Byte offset of 16-byte piece `piece` (0..15) of row `row` of an operand tile: two blocks of 64 columns, rows of 128
/// bytes, the pieces of a row permuted so that eight rows lie in different banks. This is the 128-byte swizzle of wgmma
/// descriptors; tiles start at multiples of 1024 bytes.
__device__ __forceinline__ uint32_t tile_at(int row, int piece) {
  return static_cast<uint32_t>((piece >> 3) * kHalfTile + row * 128 + (((piece & 7) ^ (row & 7)) << 4));
}
/// Byte offset of an element of a 32 x 32 matrix: rows of 64 bytes with the 64-byte swizzle.
__device__ __forceinline__ uint32_t square_at(int row, int column) {
  return static_cast<uint32_t>(row * 64 + (((column >> 3) ^ ((row >> 1) & 3)) << 4) + (column & 7) * 2);
}

/// What a stage of the ring holds, as byte offsets.
struct Stage {
  static constexpr int kQuery = 0;                         // q e^G, scaled
  static constexpr int kKey = kQuery + kTile;              // -k e^G
  static constexpr int kWrite = kKey + kTile;              // k e^{G_end - G}
  static constexpr int kValue = kWrite + kTile;            // v, later the output
  static constexpr int kInverse = kValue + kTile;          // (I + A)^-1 diag(beta)
  static constexpr int kProbability = kInverse + kSquare;  // P
  static constexpr int kDecay = kProbability + kSquare;    // e^{G_end}, fp32
  static constexpr int kBeta = kDecay + kHead * 4;
  static constexpr int kBytes = (kBeta + kChunk * 4 + 1023) / 1024 * 1024;
};

/// What belongs to a preparing group alone.
struct Scratch {
  static constexpr int kScores = 0;                                // A, fp32
  static constexpr int kNorms = kScores + kChunk * kScoreRow * 4;  // factors of q and k of each row
  static constexpr int kTotals = kNorms + 2 * kChunk * 4;          // sums of the gates of rows 0-15 and 16-31
  static constexpr int kCorners = kTotals + 2 * kHead * 4;         // inverses of the diagonal blocks, fp32
  static constexpr int kBytes = kCorners + 2 * 16 * kCornerRow * 4;
};

/// `kAnyGate`: fp32 gate inputs and unbounded gates; otherwise a bf16 input of the bounded gate, with a third preparing
/// group in place of second input buffers.
template <bool kAnyGate>
struct Layout {
  static constexpr int kGroups = kAnyGate ? 2 : 3;   // preparing groups
  static constexpr int kBuffers = kAnyGate ? 2 : 1;  // input buffers of a group
  static constexpr int kStages = kAnyGate ? 2 : 3;
  static constexpr int kThreads = (1 + kGroups) * kGroup;
  static constexpr int kRecurrenceRegisters = kAnyGate ? 240 : 224;
  static constexpr int kPrepareRegisters = kAnyGate ? 128 : 96;
  static constexpr int kGateRow = kAnyGate ? kHead * 4 : kRowBytes;
  // An input buffer: q, k, gate; overwritten in place by the operands of the scores.
  static constexpr int kInputQuery = 0;
  static constexpr int kInputKey = kTile;
  static constexpr int kInputGate = 2 * kTile;
  static constexpr int kInputBytes = 2 * kTile + kChunk * kGateRow;
  static constexpr int kStageBase = 0;
  static constexpr int kInputBase = kStages * Stage::kBytes;
  static constexpr int kScratchBase = kInputBase + kGroups * kBuffers * kInputBytes;
  static constexpr int kBytes = kScratchBase + kGroups * Scratch::kBytes;
  // Stage i belongs to group i: at most one group waits for a stage to become empty.
  static_assert(kGroups == kStages);

  // Named barriers; 0 is __syncthreads.
  static constexpr int kGroupBarrier = 1;
  static constexpr int kFullBarrier = kGroupBarrier + kGroups;
  static constexpr int kEmptyBarrier = kFullBarrier + kStages;
};
static_assert(Layout<false>::kBytes <= 226 * 1024 && Layout<true>::kBytes <= 226 * 1024);

/// The chunks that a block walks.
struct Walk {
  int64_t first_token;  // packed row of the first token
  int tokens;
  int chunks;
  int sequence, head, slice, segment, segments;
};

/// Segment `segment` of `segments` of a sequence, in chunks.
__host__ __device__ inline int segment_chunks(int64_t tokens, int segments) {
  const int64_t chunks = (tokens + kChunk - 1) / kChunk;
  return static_cast<int>((chunks + segments - 1) / segments);
}

}  // namespace furlong::kda::cuda
