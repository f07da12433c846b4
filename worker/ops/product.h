// Matrix products by oneDNN, one primitive for each shape, kept. Everything here belongs to one
// thread: its primitives, their arguments and their scratchpad are shared with no other (a
// primitive that two threads execute over one scratchpad gives wrong numbers without saying so).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

#include "common/types.h"

namespace zeroshard::cpu {

// C[m,n] = op(A)[m,k] * op(B)[k,n] (+ bias[n]) (+ C). Row-major; a transposed operand is stored the
// other way round. A leading dimension of 0 means dense.
struct ProductKey {
  int64_t m = 0, n = 0, k = 0;
  int64_t ld_a = 0, ld_b = 0;  // elements, as stored
  bool transpose_a = false, transpose_b = false;
  DType ab_type = DType::kF32;  // also of the bias
  DType c_type = DType::kF32;
  bool bias = false, accumulate = false;
  int threads = 1;  // OpenMP threads inside the product

  bool operator==(const ProductKey&) const = default;
};

struct ProductKeyHash {
  size_t operator()(const ProductKey& key) const;
};

// Grow-only memory at a multiple of 64 bytes; its contents do not survive a call.
class Scratch {
 public:
  template <typename T>
  T* Get(int64_t count) {
    return static_cast<T*>(Bytes(static_cast<size_t>(count) * sizeof(T)));
  }
  void* Bytes(size_t bytes);  // throws std::bad_alloc

 private:
  struct Free {
    void operator()(void* data) const;
  };
  std::unique_ptr<void, Free> data_;
  size_t capacity_ = 0;
};

// A primitive with its arguments. Methods throw dnnl::error and std::bad_alloc.
class Product {
 public:
  explicit Product(const ProductKey& key);
  ~Product();
  Product(const Product&) = delete;
  Product& operator=(const Product&) = delete;

  // `bias` where the key says so. The bits do not depend on key.threads as long as
  // ThreadsThatKeepBits allows them.
  void Run(const void* a, const void* b, const void* bias, void* c, Scratch* scratchpad);
  // oneDNN's name of the kernel; "brg:..." are the fast ones.
  const std::string& implementation() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

// The most threads up to key.threads that share a product without changing its bits: oneDNN 2.6
// splits the sum over k of a product with transposed A and large k (from 2,048 on) among its
// threads where they are more than the blocks of 64 columns.
int ThreadsThatKeepBits(const ProductKey& key);

// What one thread needs for its products. Not thread-safe.
class ProductContext {
 public:
  // The kept product of that key, made at the first call; valid until the next call.
  Product* Find(const ProductKey& key);
  Scratch* scratchpad() { return &scratchpad_; }
  // For what a kernel keeps beside its products; theirs do not touch it.
  Scratch* buffer() { return &buffer_; }
  void Run(const ProductKey& key, const void* a, const void* b, void* c) {
    Find(key)->Run(a, b, nullptr, c, &scratchpad_);
  }

 private:
  static constexpr size_t kMostKept =
      512;  // beyond that all are dropped; a model needs a few dozen
  std::unordered_map<ProductKey, std::unique_ptr<Product>, ProductKeyHash> kept_;
  Scratch scratchpad_;
  Scratch buffer_;
};

}  // namespace zeroshard::cpu
