#include "furlong/ops/kda/cpu/scratch.h"

#include <algorithm>

#include "furlong/ops/kda/cpu/team.h"

namespace furlong::kda {

ChunkMemory::ChunkMemory(int64_t K, int64_t V, bool gradient) {
  scratch_.K = K;
  scratch_.V = V;
  scratch_.pairwise = pairwise_;
  int64_t floats = 0;
  carve(nullptr, floats, gradient);
  memory_ = hwy::AllocateAligned<float>(floats);
  floats = 0;
  carve(memory_.get(), floats, gradient);
}

void ChunkMemory::carve(float* base, int64_t& used, bool gradient) {
  const int64_t K = scratch_.K, V = scratch_.V, R = kChunkRows, stack = ChunkScratch::packed_rows(kMaxBlocks);
  const auto take = [&](float*& pointer, int64_t floats) {
    pointer = base == nullptr ? nullptr : base + used;
    used += round_up(floats, 16);
  };
  ChunkScratch& s = scratch_;
  for (float** rows : {&s.q, &s.k, &s.g, &s.row, &s.to_end, &s.at_end}) take(*rows, R * K);
  for (float** rows : {&s.v, &s.correction, &s.written}) take(*rows, R * V);
  for (float** blocks : {&s.to_offset, &s.total, &s.start}) take(*blocks, kMaxBlocks * K);
  for (float** vector : {&s.whole, &s.pair_sum, &s.pair_decay}) take(*vector, K);
  for (float** triangle : {&s.columns, &s.rights}) take(*triangle, stack * K);
  take(s.beta, R);
  take(s.lefts, 2 * R * K);
  take(s.from_start, 2 * R * K);
  take(s.turned, std::max({R * K, R * V, K * V}));
  take(s.all_scores, ChunkScratch::score_rows * ChunkScratch::score_stride);
  take(s.state, kMostTaskHeads * K * V);
  take(s.product, 2 * R * V);
  if (!gradient) return;
  take(s.d_scores, ChunkScratch::score_rows * ChunkScratch::score_stride);
  for (float** rows : {&s.d_written, &s.d_v}) take(*rows, R * V);
  take(s.residual, 2 * R * V);
  take(s.d_state, kMostTaskHeads * K * V);
  take(s.state_turned, K * V);
  take(s.d_from_start, 2 * R * K);
  for (float** rows : {&s.d_at_end, &s.d_right, &s.d_q, &s.d_k, &s.d_g}) take(*rows, R * K);
  take(s.d_left, 2 * kBlockRows * K);
  take(s.d_beta, R);
  take(s.d_diagonal, R);
  take(s.end_sum, K);
}

ChunkTeam::ChunkTeam(int64_t K, int64_t V, int64_t members, bool gradient)
    : K_(K), V_(V), members_(members), gradient_(gradient) {
  ChunkScratch unplaced = {};
  slot_floats_ = place(unplaced, nullptr);
  memory_ = hwy::AllocateAligned<float>(slots() * slot_floats_ + (gradient ? (slots() + 1) * K * V : 0));
  d_states_ = memory_.get() + slots() * slot_floats_;
  pairwise_ = std::make_unique<bool[]>(slots() * kMaxBlocks);
  made_ = std::make_unique<Progress[]>(members);
  walked_ = std::make_unique<Progress[]>(members);
}

void ChunkTeam::reset() {
  for (int64_t member = 0; member < members_; ++member) {
    made_[member].reset();
    walked_[member].reset();
  }
}

ChunkScratch ChunkTeam::at(ChunkScratch s, int64_t chunk) const {
  const int64_t slot = chunk % slots();
  place(s, memory_.get() + slot * slot_floats_);
  if (!gradient_) return s;
  s.pairwise = pairwise_.get() + slot * kMaxBlocks;
  s.d_state = d_state(chunk);
  return s;
}

ChunkScratch ChunkTeam::unshared(const ChunkScratch& s, int64_t chunk) const {
  ChunkScratch own = at(s, chunk);
  own.all_scores = s.all_scores;
  own.whole = s.whole;
  own.beta = s.beta;
  return own;
}

/// Points `s` into a slot; returns the floats of one.
int64_t ChunkTeam::place(ChunkScratch& s, float* slot) const {
  const int64_t K = K_, V = V_, R = kChunkRows, stack = ChunkScratch::packed_rows(kMaxBlocks);
  int64_t used = 0;
  const auto take = [&](float*& pointer, int64_t floats) {
    pointer = slot == nullptr ? nullptr : slot + used;
    used += round_up(floats, 16);
  };
  take(s.from_start, 2 * R * K);
  take(s.at_end, R * K);
  take(s.all_scores, ChunkScratch::score_rows * ChunkScratch::score_stride);
  take(s.whole, K);
  take(s.beta, R);
  if (!gradient_) return used;
  take(s.residual, 2 * R * V);
  for (float** rows : {&s.d_written, &s.d_v}) take(*rows, R * V);
  for (float** rows : {&s.q, &s.k, &s.g, &s.row, &s.to_end}) take(*rows, R * K);
  for (float** triangle : {&s.columns, &s.rights}) take(*triangle, stack * K);
  take(s.lefts, 2 * R * K);
  take(s.start, kMaxBlocks * K);
  return used;
}

}  // namespace furlong::kda
