#pragma once

// Entry points of the SIMD kernels; each picks the best target of the machine.

#include <c10/util/BFloat16.h>

#include "furlong/ops/kda/cpu/args.h"
#include "furlong/ops/kda/cpu/scratch.h"
#include "furlong/ops/kda/cpu/team.h"

namespace furlong::kda {

/// A task of whole width, or with a team that of one member on its strip of columns (cpu/team.h).
void chunk_forward(const ChunkInputs<float>& in, const ChunkOutputs<float>& out, const ChunkTask& task,
                   const ChunkScratch& scratch, ChunkTeam* team = nullptr, int64_t member = 0);
void chunk_forward(const ChunkInputs<c10::BFloat16>& in, const ChunkOutputs<c10::BFloat16>& out, const ChunkTask& task,
                   const ChunkScratch& scratch, ChunkTeam* team = nullptr, int64_t member = 0);
void chunk_backward(const ChunkInputs<float>& in, const ChunkGradients<float>& grad, const ChunkTask& task,
                    const ChunkScratch& scratch, ChunkTeam* team = nullptr, int64_t member = 0);
void chunk_backward(const ChunkInputs<c10::BFloat16>& in, const ChunkGradients<c10::BFloat16>& grad,
                    const ChunkTask& task, const ChunkScratch& scratch, ChunkTeam* team = nullptr, int64_t member = 0);

}  // namespace furlong::kda
