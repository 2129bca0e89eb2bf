#include "app/model_config.h"

#include "furlong/base/config.h"
#include "furlong/checkpoint/run_folder.h"
#include "furlong/train/config.h"

namespace furlong::app {

ModelConfig load_model_config(const std::filesystem::path& path) {
  std::error_code code;
  if (std::filesystem::is_directory(path, code)) return ModelConfig::load(find_checkpoint(path));
  if (path.extension() == ".toml" && ConfigDocument::from_file(path).values().contains("stages")) {
    return TrainConfig::load(path).model;
  }
  return ModelConfig::load(path);
}

}  // namespace furlong::app
