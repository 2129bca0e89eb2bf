# The libraries. Sources are found by room: a new file in a folder needs no line here.

# base, tokenizer: no torch.
furlong_sources(base_sources furlong/base)
add_library(furlong_base STATIC ${base_sources})
target_link_libraries(furlong_base PUBLIC furlong_compile OpenMP::OpenMP_CXX nlohmann_json::nlohmann_json
  tomlplusplus::tomlplusplus)
# {fmt} and c10 headers only; nothing of LibTorch is linked here.
target_include_directories(furlong_base SYSTEM PUBLIC "${FURLONG_TORCH_DIR}/include")

furlong_sources(tokenizer_sources furlong/tokenizer)
add_library(furlong_tokenizer STATIC ${tokenizer_sources})
target_link_libraries(furlong_tokenizer PUBLIC furlong_base PkgConfig::PCRE2)

# Everything above the operators.
set(core_folders furlong/checkpoint furlong/data furlong/optim furlong/model furlong/train furlong/infer furlong/eval)
furlong_sources(core_sources ${core_folders})
furlong_sources(layer_sources furlong/ops)
list(FILTER layer_sources INCLUDE REGEX "/layer[^/]*\\.cpp$")
add_library(furlong_core STATIC ${core_sources} ${layer_sources})
target_link_libraries(furlong_core PUBLIC furlong_ops furlong_base furlong_tokenizer)
target_precompile_headers(furlong_core REUSE_FROM furlong_ops)

# The program.
file(GLOB app_sources CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/app/*.cpp")
add_executable(furlong ${app_sources})
target_link_libraries(furlong PRIVATE furlong_core CLI11::CLI11)
