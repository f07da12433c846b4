// The status page: HTML with its style and scripts in it, made at build time by embed.cmake.
#pragma once

namespace zeroshard::coordinator {

// "@nonce@" stands where the answer's nonce goes.
extern const char kPageHtml[];

}  // namespace zeroshard::coordinator
