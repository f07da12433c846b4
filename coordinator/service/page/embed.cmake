# Writes OUTPUT: the page of FOLDER, its style and scripts put in, as a C++ string.
cmake_minimum_required(VERSION 3.25)  # older policies would replace "@style@" here
file(READ "${FOLDER}/page.html" page)
file(READ "${FOLDER}/page.css" style)
set(script "")
foreach(part dom curve views page)
  file(READ "${FOLDER}/${part}.js" text)
  string(APPEND script "${text}")
endforeach()
foreach(part style script)
  if("${${part}}" MATCHES "</${part}")
    message(FATAL_ERROR "the ${part} of the page would end itself")
  endif()
endforeach()
foreach(part style script)
  string(FIND "${page}" "/*@${part}@*/" place)
  if(place EQUAL -1)
    message(FATAL_ERROR "page.html has no place for the ${part}")
  endif()
  string(REPLACE "/*@${part}@*/" "${${part}}" page "${page}")
endforeach()
file(WRITE "${OUTPUT}" "// Made by embed.cmake from the files of coordinator/service/page.
#include \"coordinator/service/page/page_html.h\"

namespace zeroshard::coordinator {

const char kPageHtml[] = R\"page(${page})page\";

}  // namespace zeroshard::coordinator
")
