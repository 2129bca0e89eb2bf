#pragma once

// Which tensor of a checkpoint fills which parameter. Strict, from the files' headers alone: every parameter is filled,
// every tensor has a place or is named among those carried through.

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "furlong/model/decoder.h"

namespace furlong {

class CheckpointReader;

/// A parameter, or one index of a stacked one, and where a checkpoint holds it.
struct ParamPlace {
  const Param* param;
  int64_t index;       // into the stacked dimension; -1: the whole parameter
  std::string stored;  // as the checkpoint spells it
  std::string scale;   // packed MXFP4 weights: `stored` holds the codes, this the scale bytes; else empty
};

struct CheckpointMap {
  std::vector<ParamPlace> places;    // in the order of the decoder's parameters
  std::vector<std::string> carried;  // tensors of parts that are not run, in the order of their names
  bool packed() const;               // some weights are MXFP4
};

/// FormatError naming the folder and the tensor: missing, unknown, under two spellings, misshapen, of a dtype that is
/// no floating-point number, or packed in a way that config.json's quantization_config does not say.
CheckpointMap map_checkpoint(const Decoder& decoder, const CheckpointReader& reader,
                             const std::filesystem::path& folder);

/// One part of the model as a checkpoint holds it.
struct GroupReport {
  std::string name;
  int64_t tensors = 0;
  uint64_t bytes = 0;
  std::map<std::string, int64_t> dtypes;  // tensors of each
  std::string checksum;                   // of names, dtypes, shapes and bytes; empty when not taken
};

/// What a checkpoint holds, by group. `checksums`: reads every byte.
std::vector<GroupReport> describe_checkpoint(const ModelConfig& config, const CheckpointReader& reader, bool checksums);

}  // namespace furlong
