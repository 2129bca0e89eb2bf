# Compiler settings shared by every target: warnings, ccache, sanitizers.

find_program(CCACHE ccache)
if(CCACHE)
  # Paths are hashed relative to the build folder and the precompiled header by its content, so that clones of the
  # repository share one cache.
  get_filename_component(ccache_base "${CMAKE_SOURCE_DIR}" DIRECTORY)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env
    CCACHE_BASEDIR=${ccache_base} CCACHE_NOHASHDIR=1
    CCACHE_SLOPPINESS=pch_defines,time_macros,include_file_mtime,include_file_ctime "${CCACHE}")
endif()

add_library(furlong_compile INTERFACE)
target_include_directories(furlong_compile INTERFACE "${CMAKE_SOURCE_DIR}")
target_compile_definitions(furlong_compile INTERFACE FMT_HEADER_ONLY=1 FURLONG_VERSION="${PROJECT_VERSION}")
# -fPIC for programs too: the precompiled header must be made and used with one set of flags.
target_compile_options(furlong_compile INTERFACE
  $<$<COMPILE_LANGUAGE:CXX>:-fPIC -Wall -Wextra -Wno-unknown-pragmas -Werror=return-type>)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  target_compile_options(furlong_compile INTERFACE $<$<COMPILE_LANGUAGE:CXX>:-fpch-preprocess>)
endif()
if(FURLONG_SANITIZE)
  # LibTorch itself is not instrumented: its containers cross the border, hence no container-overflow annotations.
  # Outlined address checks, no checks that the address sanitizer makes anyway (null, object-size) and fewer SIMD targets
  # (simd_targets.h): the inlined vector kernels would compile for many minutes otherwise.
  target_compile_options(furlong_compile INTERFACE
    -fsanitize=${FURLONG_SANITIZE} -fno-sanitize=vptr,null,object-size -fno-sanitize-recover=undefined
    --param=asan-instrumentation-with-call-threshold=0 -fno-omit-frame-pointer -g1 -O1)
  target_compile_definitions(furlong_compile INTERFACE FURLONG_SANITIZED)
  target_link_options(furlong_compile INTERFACE -fsanitize=${FURLONG_SANITIZE})
endif()
