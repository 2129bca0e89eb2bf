#pragma once

// A checkpoint folder written anew in the published form: Furlong's own and Hugging Face folders both ways.

#include <c10/core/ScalarType.h>

#include <cstdint>
#include <filesystem>
#include <functional>
#include <optional>

namespace furlong {

struct ConvertOptions {
  /// Of parameters with the compute policy; none: as stored. Those with the fp32 policy keep their stored dtype, or are
  /// written as fp32 when `dtype` is given.
  std::optional<at::ScalarType> dtype = {};
  uint64_t shard_bytes = 5'000'000'000;  // most bytes of tensors in one file
  std::function<void(int64_t shard, int64_t shards, uint64_t bytes)> on_shard =
      {};  // after each file, also reused ones
};

struct ConvertResult {
  int64_t shards = 0, reused_shards = 0, tensors = 0, carried = 0;
  uint64_t bytes = 0;
};

/// Reads the folder `from` strictly (weights.h) and writes `to`: today's names and shapes, one model.safetensors or
/// shards with an index, config.json, and the other files of `from` but those of training runs. Packed experts are
/// written in the given dtype, or bf16.
///
/// One tensor is in memory at a time. Files are written into a folder `to` + ".partial", which is renamed at the end: a
/// killed run leaves no half `to`, and the next one with the same source and options goes on with the files that are
/// whole. UsageError when `to` exists and is not empty, or is `from` itself.
ConvertResult convert_checkpoint(const std::filesystem::path& from, const std::filesystem::path& to,
                                 const ConvertOptions& options);

}  // namespace furlong
