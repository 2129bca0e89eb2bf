# Tests stand beside their source (x_test.cpp); each room makes one test program, build/PRESET/bin/ROOM_test.
# Benches (x_bench.cpp) make one program each.

# main of the unit tests is among them (test_main.cpp): programs with a main of their own do not pull it in.
file(GLOB support_sources CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/tests/support/*.cpp")
add_library(furlong_test_support STATIC ${support_sources})
target_link_libraries(furlong_test_support PUBLIC furlong_core GTest::gtest GTest::gmock)
target_compile_definitions(furlong_test_support PUBLIC FURLONG_SOURCE_DIR="${CMAKE_SOURCE_DIR}"
  FURLONG_BINARY_DIR="${CMAKE_BINARY_DIR}")

# furlong_room_test(name folder...): one program of all *_test.cpp below the folders.
function(furlong_room_test name)
  set(all "")
  foreach(folder IN LISTS ARGN)
    file(GLOB_RECURSE found CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/${folder}/*_test.cpp")
    list(APPEND all ${found})
  endforeach()
  if(NOT all)
    return()
  endif()
  add_executable(${name} ${all})
  target_link_libraries(${name} PRIVATE furlong_test_support)
  target_precompile_headers(${name} REUSE_FROM furlong_ops)
  add_test(NAME ${name} COMMAND ${name})
  # Waiting threads sleep instead of spinning: a busy machine must not make tests time out.
  set_tests_properties(${name} PROPERTIES TIMEOUT 900 ENVIRONMENT OMP_WAIT_POLICY=passive)
endfunction()

furlong_room_test(base_test furlong/base)
furlong_room_test(tokenizer_test furlong/tokenizer)
file(GLOB op_folders CONFIGURE_DEPENDS LIST_DIRECTORIES true "${CMAKE_SOURCE_DIR}/furlong/ops/*")
foreach(folder IN LISTS op_folders)
  if(IS_DIRECTORY "${folder}")
    get_filename_component(op "${folder}" NAME)
    furlong_room_test(${op}_test "furlong/ops/${op}")
  endif()
endforeach()
foreach(room checkpoint data optim model train infer eval)
  furlong_room_test(${room}_test "furlong/${room}")
endforeach()
furlong_room_test(integration_test tests/integration)

# The golden-vector runner: one source file for each family of kinds.
file(GLOB golden_sources CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/tests/golden/*.cpp")
if(golden_sources)
  add_executable(golden_test ${golden_sources})
  target_link_libraries(golden_test PRIVATE furlong_test_support CLI11::CLI11)
  target_precompile_headers(golden_test REUSE_FROM furlong_ops)
  add_test(NAME golden_test COMMAND golden_test --dir "${CMAKE_SOURCE_DIR}/tests/golden")
endif()

# Acceptance programs that a script of tests/acceptance calls.
add_executable(split_check tests/acceptance/split_check.cpp tests/acceptance/split_cases.cpp)
target_link_libraries(split_check PRIVATE furlong_test_support CLI11::CLI11)
target_precompile_headers(split_check REUSE_FROM furlong_ops)

# Torch-free programs of the CUDA kernels (x_test.cu, x_bench.cu), one each: build/PRESET/bin/OP_x_test. Without a GPU they
# say SKIP.
if(FURLONG_CUDA_KERNELS)
  file(GLOB_RECURSE device_programs CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/furlong/ops/*_test.cu"
    "${CMAKE_SOURCE_DIR}/furlong/ops/*_bench.cu")
  foreach(source IN LISTS device_programs)
    file(RELATIVE_PATH name "${CMAKE_SOURCE_DIR}/furlong/ops" "${source}")  # kda/cuda/step_test.cu: kda_cuda_step_test
    string(REGEX REPLACE "\\.cu$" "" name "${name}")
    string(REPLACE "/" "_" name "${name}")
    add_executable(${name} ${source})
    target_link_libraries(${name} PRIVATE furlong_kernels OpenMP::OpenMP_CXX)
    target_compile_options(${name} PRIVATE -Xcompiler=-fopenmp)
    if(name MATCHES "_test$")
      add_test(NAME ${name} COMMAND ${name})
    endif()
  endforeach()
endif()

# In a build without kernels those of the KDA gradient run on the CPU, every thread a fiber (cuda/emulation.h), where the
# headers of a CUDA toolkit are at hand. The second order lets the last warp run first: a missing barrier shows.
if(NOT FURLONG_CUDA_KERNELS)
  find_path(FURLONG_CUDA_HEADERS cuda_bf16.h HINTS ENV CUDA_HOME /usr/local/cuda PATH_SUFFIXES include)
  if(FURLONG_CUDA_HEADERS)
    set(emulated furlong/ops/kda/cuda/backward.cu furlong/ops/kda/cuda/backward_test.cu)
    set_source_files_properties(${emulated} PROPERTIES LANGUAGE CXX)
    add_executable(kda_emulated_backward_test ${emulated})
    target_include_directories(kda_emulated_backward_test SYSTEM PRIVATE "${FURLONG_CUDA_HEADERS}")
    target_link_libraries(kda_emulated_backward_test PRIVATE furlong_compile OpenMP::OpenMP_CXX)
    foreach(order 0 1)
      add_test(NAME kda_emulated_backward_test_order_${order}
        COMMAND kda_emulated_backward_test --small --repeats 2)
      set_tests_properties(kda_emulated_backward_test_order_${order} PROPERTIES TIMEOUT 900
        ENVIRONMENT FURLONG_EMULATION_ORDER=${order})
    endforeach()
  else()
    message(STATUS "No CUDA headers: the kernels of the KDA gradient are not tested on the CPU")
  endif()
endif()

file(GLOB_RECURSE bench_sources CONFIGURE_DEPENDS "${CMAKE_SOURCE_DIR}/furlong/*_bench.cpp")
foreach(source IN LISTS bench_sources)
  get_filename_component(bench "${source}" NAME_WE)
  add_executable(${bench} ${source})
  target_link_libraries(${bench} PRIVATE furlong_test_support benchmark::benchmark)
  target_precompile_headers(${bench} REUSE_FROM furlong_ops)
  set_target_properties(${bench} PROPERTIES ENABLE_EXPORTS ON)  # names in call stacks
endforeach()
