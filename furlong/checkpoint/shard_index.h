#pragma once

// model.safetensors.index.json: which shard holds which tensor. No torch here.

#include <filesystem>
#include <map>
#include <string>

namespace furlong {

/// "weight_map": tensor name -> file name beside the index. FormatError names the file and the entry: not an object of
/// strings, a name given twice, a file name that leaves the folder.
std::map<std::string, std::string> read_shard_index(const std::filesystem::path& path);

}  // namespace furlong
