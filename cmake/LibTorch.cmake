# LibTorch out of the torch wheel, as one imported target: furlong::libtorch.
#
# The wheel's own CMake package detects CUDA toolkits and fails where only part of one is installed, so the few facts
# needed are read from the interpreter instead: FURLONG_PYTHON (environment or cache), else .venv/bin/python.
# FURLONG_TORCH_DIR (cache) names an unpacked wheel's torch folder directly, without an interpreter.

if(NOT FURLONG_TORCH_DIR)
  if(DEFINED ENV{FURLONG_PYTHON})
    set(FURLONG_PYTHON "$ENV{FURLONG_PYTHON}")
  elseif(NOT FURLONG_PYTHON)
    set(FURLONG_PYTHON "${CMAKE_SOURCE_DIR}/.venv/bin/python")
  endif()
  execute_process(
    COMMAND "${FURLONG_PYTHON}" -c "import importlib.util as u; print(u.find_spec('torch').submodule_search_locations[0])"
    OUTPUT_VARIABLE FURLONG_TORCH_DIR OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE result ERROR_QUIET)
  if(NOT result EQUAL 0)
    message(FATAL_ERROR "'${FURLONG_PYTHON}' has no torch. Run `bash tools/bootstrap.sh`, or set FURLONG_PYTHON.")
  endif()
endif()

file(STRINGS "${FURLONG_TORCH_DIR}/version.py" version_line REGEX "__version__ = '")
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+[^']*" FURLONG_TORCH_VERSION "${version_line}")
if(FURLONG_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "torch ${FURLONG_TORCH_VERSION} in ${FURLONG_TORCH_DIR}: 2.11 or newer is needed")
endif()
# The Python package reads from the cache which torch a build folder links.
set(FURLONG_TORCH_LINKED "${FURLONG_TORCH_DIR}" CACHE INTERNAL "")
message(STATUS "LibTorch ${FURLONG_TORCH_VERSION} in ${FURLONG_TORCH_DIR}")

add_library(furlong_libtorch INTERFACE)
add_library(furlong::libtorch ALIAS furlong_libtorch)
target_include_directories(furlong_libtorch SYSTEM INTERFACE
  "${FURLONG_TORCH_DIR}/include" "${FURLONG_TORCH_DIR}/include/torch/csrc/api/include")
set(torch_libraries torch_cpu c10)
if(FURLONG_CUDA)
  list(APPEND torch_libraries torch_cuda c10_cuda)
endif()
foreach(name IN LISTS torch_libraries)
  target_link_libraries(furlong_libtorch INTERFACE "${FURLONG_TORCH_DIR}/lib/lib${name}.so")
endforeach()

# The wheel's folder comes first in the run path, so that its OpenMP runtime is the only one loaded. A CUDA wheel finds
# its own libraries through its run path; the linker need not resolve them.
set(CMAKE_BUILD_RPATH "${FURLONG_TORCH_DIR}/lib")
target_link_options(furlong_libtorch INTERFACE "-Wl,--allow-shlib-undefined")
