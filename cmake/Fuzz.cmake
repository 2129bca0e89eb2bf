# Fuzzing programs (libFuzzer) of everything that reads what others wrote: one for each tests/fuzz/*_fuzz.cpp. They need
# no LibTorch but its {fmt} headers: the parsers include no torch header.

find_package(nlohmann_json 3.10 REQUIRED)
find_package(tomlplusplus REQUIRED)
find_package(PkgConfig REQUIRED)
pkg_check_modules(PCRE2 REQUIRED IMPORTED_TARGET libpcre2-8)

file(GLOB fuzzed CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/furlong/base/*.cpp" "${CMAKE_SOURCE_DIR}/furlong/tokenizer/*.cpp"
  "${CMAKE_SOURCE_DIR}/furlong/checkpoint/safetensors*.cpp" "${CMAKE_SOURCE_DIR}/furlong/checkpoint/shard_index.cpp"
  "${CMAKE_SOURCE_DIR}/furlong/model/config.cpp" "${CMAKE_SOURCE_DIR}/furlong/model/hugging_face.cpp")
list(FILTER fuzzed EXCLUDE REGEX "_(test|bench)\\.cpp$")
add_library(furlong_fuzzed STATIC ${fuzzed})
target_link_libraries(furlong_fuzzed PUBLIC furlong_compile nlohmann_json::nlohmann_json tomlplusplus::tomlplusplus
  PkgConfig::PCRE2)
# tools/tidy: an omp.h for clang, which has none without its own OpenMP library; one thread is enough here.
target_include_directories(furlong_fuzzed SYSTEM PUBLIC "${FURLONG_TORCH_DIR}/include" "${CMAKE_SOURCE_DIR}/tools/tidy")
target_compile_options(furlong_fuzzed PUBLIC -fsanitize=fuzzer-no-link,address,undefined -fno-sanitize-recover=undefined
  -fno-omit-frame-pointer -g1 -O1 -UNDEBUG)

file(GLOB targets CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/tests/fuzz/*_fuzz.cpp")
foreach(source IN LISTS targets)
  get_filename_component(name "${source}" NAME_WE)
  add_executable(${name} ${source} "${CMAKE_SOURCE_DIR}/tests/fuzz/memory_file.cpp")
  target_link_libraries(${name} PRIVATE furlong_fuzzed)
  target_link_options(${name} PRIVATE -fsanitize=fuzzer,address,undefined)
endforeach()
