#pragma once

// Shared memory and division of labour of the forward kernels.
//
// A walk is the chunks of one (sequence, segment, head, slice of value columns), in order. What depends on the state is
// done by one warpgroup of the walking block that keeps it in its registers in fp32; what does not, by preparing groups
// of four warps: of the same block (OwnLayout), or of all blocks of the machine (PooledLayout). Prepared chunks pass
// through a ring of stages in shared memory with two barriers each: full (whoever fills the stage arrives, the
// recurrence waits) and empty (the other way round).

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

/// Asynchronous copy of the rows of a chunk, of `kBytes` bytes each, by kThreads threads; piece p of row r goes to tile
/// + at(r, p). Rows from `rows` on become zero.
template <int kBytes, int kThreads, typename At>
__device__ __forceinline__ void copy_rows(uint32_t tile, At at, const char* first_row, int64_t row_bytes, int rows,
                                          int thread) {
  constexpr int kPieces = kBytes / 16, kStep = kThreads / kPieces;  // rows between two pieces of a thread
  const int row = thread / kPieces, piece = thread % kPieces;
  const char* from = first_row + row * row_bytes + piece * 16;
#pragma unroll
  for (int i = 0; i < kChunk / kStep; ++i) {
    copy_async_16(tile + at(row + i * kStep, piece), from, row + i * kStep < rows);
    from += kStep * row_bytes;
  }
}

/// Byte offset of a 16-byte piece of a row of `kColumns` values or outputs; eight rows lie in different banks.
template <int kColumns>
__device__ __forceinline__ uint32_t value_at(int row, int piece) {
  return static_cast<uint32_t>(row * (kColumns * 2 + 16) + piece * 16);
}
template <int kColumns>
inline constexpr int kValueBytes = kChunk * (kColumns * 2 + 16);

/// A prepared chunk as byte offsets: a stage of the ring in shared memory. All but the values can be prepared
/// elsewhere.
struct Stage {
  static constexpr int kKey = 0;                           // -k e^G
  static constexpr int kWrite = kKey + kTile;              // k e^{G_end - G}
  static constexpr int kQuery = kWrite + kTile;            // q e^G, scaled; not used by maps
  static constexpr int kDecay = kQuery + kTile;            // e^{G_end}, fp32
  static constexpr int kInverse = kDecay + kHead * 4;      // (I + A)^-1 diag(beta)
  static constexpr int kProbability = kInverse + kSquare;  // P; not used by maps
  static constexpr int kPrepared = kProbability + kSquare;
  static constexpr int kBeta = kPrepared;  // for the preparing group alone
};
/// Where a stage has beta, for the preparing group alone, and v; its bytes. Tiles start at multiples of 1024.
template <bool kPooled, int kColumns>
struct StageLayout {
  static constexpr int kValue = Stage::kPrepared + (kPooled ? 0 : kChunk * 4);
  static constexpr int kBytes = (kValue + kValueBytes<kColumns> + 1023) / 1024 * 1024;
};

/// What belongs to a preparing group alone.
struct Scratch {
  static constexpr int kScores = 0;                                // A, fp32
  static constexpr int kNorms = kScores + kChunk * kScoreRow * 4;  // factors of q and k of each row
  static constexpr int kTotals = kNorms + 2 * kChunk * 4;          // sums of the gates of rows 0-15 and 16-31
  static constexpr int kCorners = kTotals + 2 * kHead * 4;         // inverses of the diagonal blocks, fp32
  static constexpr int kBytes = kCorners + 2 * 16 * kCornerRow * 4;
};

/// An input buffer: q, k, gate; overwritten in place by the operands of the scores. `kAnyGate`: fp32 gate inputs and
/// unbounded gates; otherwise a bf16 input of the bounded gate.
template <bool kAny>
struct InputLayout {
  static constexpr bool kAnyGate = kAny;
  static constexpr int kInputQuery = 0;
  static constexpr int kInputKey = kTile;
  static constexpr int kInputGate = 2 * kTile;
  static constexpr int kInputBytes = 2 * kTile + kChunk * (kAny ? kHead * 4 : kRowBytes);
};

/// Every block prepares the chunks that it walks. One warpgroup for the recurrence, kGroups groups of four warps that
/// prepare; stage i belongs to group i, so at most one group waits for a stage to become empty.
template <bool kAny>
struct OwnLayout : InputLayout<kAny> {
  static constexpr bool kPooled = false;
  static constexpr int kColumns = 128;  // of values that a block walks with
  using Ring = StageLayout<kPooled, kColumns>;
  static constexpr int kGroups = kAny ? 2 : 3;   // preparing groups
  static constexpr int kBuffers = kAny ? 2 : 1;  // input buffers of a group
  static constexpr int kStages = kGroups;
  static constexpr int kThreads = (1 + kGroups) * kGroup;
  static constexpr int kRecurrenceRegisters = kAny ? 240 : 224;
  static constexpr int kPrepareRegisters = kAny ? 128 : 96;
  static constexpr int kInputBase = kStages * Ring::kBytes;
  static constexpr int kScratchBase = kInputBase + kGroups * kBuffers * InputLayout<kAny>::kInputBytes;
  static constexpr int kBytes = kScratchBase + kGroups * Scratch::kBytes;

  // Named barriers; 0 is __syncthreads.
  static constexpr int kGroupBarrier = 1;
  static constexpr int kFullBarrier = kGroupBarrier + kGroups;
  static constexpr int kEmptyBarrier = kFullBarrier + kStages;
};

/// All blocks of the machine prepare for the few that walk (cuda/pool.cuh), with 64 columns each: the recurrence is a
/// chain, and half the products make a shorter one. Warpgroups of a walking block: one for the recurrence, one of which
/// half fetches prepared chunks and half stores outputs, two that prepare, one that rests: its registers and shared
/// memory are used up. Of any other block: five that prepare.
template <bool kAny>
struct PooledLayout : InputLayout<kAny> {
  static constexpr bool kPooled = true;
  static constexpr int kColumns = 64;
  using Ring = StageLayout<kPooled, kColumns>;
  static constexpr int kGroups = 5;
  static constexpr int kCarryGroup = 1, kFirstPrepareGroup = 2;
  static constexpr int kWalkerGroups = 2;  // that prepare in a walking block
  static constexpr int kRestGroup = kFirstPrepareGroup + kWalkerGroups;
  static constexpr int kBuffers = 1;
  static constexpr int kStages = kAny ? 3 : 4;
  static constexpr int kOutputs = 2;  // chunks of output on their way
  static constexpr int kThreads = kGroups * kGroup;
  static constexpr int kCarryThreads = kGroup / 2;  // that fetch, and that store
  static constexpr int kRecurrenceRegisters = 208, kCarryRegisters = 56, kRestRegisters = 24;

  // What a preparing group has in shared memory.
  static constexpr int kScratch = InputLayout<kAny>::kInputBytes;
  static constexpr int kSquares = kScratch + Scratch::kBytes;  // T, P and beta of Stage
  static constexpr int kBias = kSquares + 2 * kSquare + kChunk * 4;
  static constexpr int kDecayScale = kBias + kHead * 4;  // a_log
  static constexpr int kEntries = kDecayScale + 16;      // the spans of this chunk and the next
  static constexpr int kItems = kEntries + 2 * 32;       // and their items
  static constexpr int kGroupBytes = kItems + 2 * 8;
  static constexpr int kOutputBase = kStages * Ring::kBytes;
  static constexpr int kPhaseBase = kOutputBase + kOutputs * kValueBytes<kColumns>;  // full and empty of each stage
  static constexpr int kOutputPhaseBase = kPhaseBase + 2 * kStages * 8;              // full and empty of each output
  static constexpr int kWalkerGroupBase = kOutputPhaseBase + 2 * kOutputs * 8;
  static constexpr int kWalkerBytes = kWalkerGroupBase + kWalkerGroups * kGroupBytes;
  static constexpr int kHelperBytes = kGroups * kGroupBytes;
  static constexpr int kBytes = kWalkerBytes > kHelperBytes ? kWalkerBytes : kHelperBytes;

  static constexpr int kGroupBarrier = 1;  // named
  static_assert(kSquares % 16 == 0 && kEntries % 16 == 0 && kGroupBytes % 16 == 0 && kWalkerGroupBase % 16 == 0);
};
constexpr int kSharedLimit = 227 * 1024;
static_assert(OwnLayout<false>::kBytes <= kSharedLimit && OwnLayout<true>::kBytes <= kSharedLimit);
static_assert(PooledLayout<false>::kBytes <= kSharedLimit && PooledLayout<true>::kBytes <= kSharedLimit);

/// Consecutive chunks of one head; 32 bytes, as a table of them is copied piece by piece.
struct Span {
  int64_t first_token;  // packed row of the first token
  int tokens;
  int chunks;
  int head;
  int first_walker, walkers;  // pooled: the blocks that walk it
  int unused;
};
static_assert(sizeof(Span) == 32);

/// What a block walks.
struct Walk : Span {
  int sequence, slice, segment, segments;
};

/// Segment `segment` of `segments` of a sequence, in chunks.
__host__ __device__ inline int segment_chunks(int64_t tokens, int segments) {
  const int64_t chunks = (tokens + kChunk - 1) / kChunk;
  return static_cast<int>((chunks + segments - 1) / segments);
}

}  // namespace furlong::kda::cuda
