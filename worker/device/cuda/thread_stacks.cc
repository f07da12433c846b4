// Threads with small stacks, in a program that links CUDA's libraries. glibc takes a thread's copy
// of all thread-local variables from its stack, and cuBLASLt alone has 92 KiB of them, so that
// pthread_create refuses what others ask for (100 KiB: the server of /metrics). Each stack is made
// larger by what a thread needs before it has any; every program with zeroshard_device_cuda has
// this in place of glibc's function, which it calls.
#include <dlfcn.h>
#include <pthread.h>

#include <cerrno>
#include <cstddef>

extern "C" int pthread_attr_setstacksize(pthread_attr_t* attributes, size_t bytes) noexcept {
  using Set = int (*)(pthread_attr_t*, size_t);
  using Least = size_t (*)(const pthread_attr_t*);
  static const auto set = reinterpret_cast<Set>(dlsym(RTLD_NEXT, "pthread_attr_setstacksize"));
  static const auto least = reinterpret_cast<Least>(dlsym(RTLD_DEFAULT, "__pthread_get_minstack"));
  if (set == nullptr) return ENOSYS;
  return set(attributes, bytes + (least == nullptr ? size_t{1} << 20 : least(attributes)));
}
