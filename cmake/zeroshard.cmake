# zeroshard_library(name [DEPS targets...]): one static library from the *.cc of this folder
# (main.cc excepted). Headers are included from the repository root: "common/clock.h".
function(zeroshard_library name)
  cmake_parse_arguments(ARG "" "" "DEPS" ${ARGN})
  file(GLOB sources CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*.cc)
  list(FILTER sources EXCLUDE REGEX "/main\\.cc$")
  if(NOT sources)  # headers only
    add_library(${name} INTERFACE)
    target_link_libraries(${name} INTERFACE ${ARG_DEPS})
    target_include_directories(${name} INTERFACE ${PROJECT_SOURCE_DIR})
    return()
  endif()
  add_library(${name} STATIC ${sources})
  target_link_libraries(${name} PUBLIC ${ARG_DEPS})
  zeroshard_flags(${name})
endfunction()

# zeroshard_program(name DEPS targets...): a program from this folder's main.cc.
function(zeroshard_program name)
  cmake_parse_arguments(ARG "" "" "DEPS" ${ARGN})
  add_executable(${name} main.cc)
  if(ZEROSHARD_SANITIZE)  # only unit tests run with sanitizers
    set_target_properties(${name} PROPERTIES EXCLUDE_FROM_ALL ON)
  endif()
  target_link_libraries(${name} PRIVATE ${ARG_DEPS})
  zeroshard_flags(${name})
endfunction()

# zeroshard_test(name [LABELS ...] [DEPS ...]): one test program from the *_test.cc of this folder;
# every TEST becomes a ctest entry "folder.Suite.Name" and may run beside any other.
function(zeroshard_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "DEPS;LABELS;SOURCES" ${ARGN})
  if(NOT ARG_SOURCES)
    file(GLOB ARG_SOURCES CONFIGURE_DEPENDS ${CMAKE_CURRENT_SOURCE_DIR}/*_test.cc)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  if(NOT ARG_LABELS)  # an empty value would take the next property for its own
    set(ARG_LABELS unit)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_link_libraries(${name} PRIVATE ${ARG_DEPS} zeroshard_hang_stacks GTest::gmock GTest::gtest
    GTest::gtest_main)
  zeroshard_flags(${name})
  math(EXPR stacks_after "${ARG_TIMEOUT} - 10")
  gtest_discover_tests(${name} TEST_PREFIX "${name}." DISCOVERY_TIMEOUT 60
    PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT}
      ENVIRONMENT "ZEROSHARD_STACKS_AFTER=${stacks_after}")
endfunction()

function(zeroshard_flags name)
  target_include_directories(${name} PUBLIC ${PROJECT_SOURCE_DIR})
  # nvcc's host code is the same compiler's; what nvcc writes itself does not pass -Wextra.
  target_compile_options(${name} PRIVATE
    $<$<COMPILE_LANGUAGE:C,CXX>:-Wall;-Wextra;-Werror;-Wno-unused-parameter;-ffp-contract=off>
    $<$<COMPILE_LANGUAGE:CUDA>:--Werror=all-warnings;--fmad=false;--expt-relaxed-constexpr;-Xcompiler=-Wall;-Xcompiler=-ffp-contract=off>)
  if(ZEROSHARD_SANITIZE)
    target_compile_options(${name} PUBLIC
      $<$<COMPILE_LANGUAGE:C,CXX>:-fsanitize=${ZEROSHARD_SANITIZE};-fno-omit-frame-pointer;-fno-sanitize-recover=all>)
    target_link_options(${name} PUBLIC -fsanitize=${ZEROSHARD_SANITIZE})
  endif()
endfunction()
