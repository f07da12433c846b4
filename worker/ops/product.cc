#include "worker/ops/product.h"

#include <algorithm>
#include <cstdlib>
#include <new>
#include <oneapi/dnnl/dnnl.hpp>
#include <utility>

#include "absl/hash/hash.h"
#include "worker/ops/task_team.h"

namespace zeroshard::cpu {
namespace {

using dnnl::memory;

memory::data_type Type(DType type) {
  return type == DType::kBF16 ? memory::data_type::bf16 : memory::data_type::f32;
}

memory::desc Operand(int64_t rows, int64_t cols, bool transposed, int64_t ld, DType type) {
  if (ld == 0) ld = transposed ? rows : cols;
  const memory::dims strides = transposed ? memory::dims{1, ld} : memory::dims{ld, 1};
  return memory::desc({rows, cols}, Type(type), strides);
}

const dnnl::engine& Engine() {
  static const dnnl::engine engine(dnnl::engine::kind::cpu, 0);
  return engine;
}

}  // namespace

size_t ProductKeyHash::operator()(const ProductKey& key) const {
  return absl::HashOf(key.m, key.n, key.k, key.ld_a, key.ld_b, key.transpose_a, key.transpose_b,
                      static_cast<int>(key.ab_type), static_cast<int>(key.c_type), key.bias,
                      key.accumulate, key.threads);
}

void Scratch::Free::operator()(void* data) const { std::free(data); }

void* Scratch::Bytes(size_t bytes) {
  if (bytes > capacity_) {
    data_.reset();
    capacity_ = 0;
    const size_t rounded = (bytes + 63) / 64 * 64;
    data_.reset(std::aligned_alloc(64, rounded));
    if (!data_) throw std::bad_alloc();
    capacity_ = rounded;
  }
  return data_.get();
}

struct Product::Impl {
  int threads;
  std::string implementation;
  size_t scratchpad_bytes;
  dnnl::stream stream;
  dnnl::matmul primitive;
  memory a, b, bias, c, scratchpad;
  std::unordered_map<int, memory> arguments;
};

Product::Product(const ProductKey& key) {
  const OmpThreads scope(key.threads);
  const dnnl::engine& engine = Engine();
  const auto a = Operand(key.m, key.k, key.transpose_a, key.ld_a, key.ab_type);
  const auto b = Operand(key.k, key.n, key.transpose_b, key.ld_b, key.ab_type);
  const auto c = Operand(key.m, key.n, false, 0, key.c_type);
  const auto bias = Operand(1, key.n, false, 0, key.ab_type);
  dnnl::primitive_attr attributes;
  attributes.set_scratchpad_mode(dnnl::scratchpad_mode::user);
  if (key.accumulate) {
    dnnl::post_ops sum;
    sum.append_sum(1.0f);
    attributes.set_post_ops(sum);
  }
  const auto what = key.bias ? dnnl::matmul::desc(a, b, bias, c) : dnnl::matmul::desc(a, b, c);
  const dnnl::matmul::primitive_desc chosen(what, attributes, engine);
  const auto at = [&engine](const memory::desc& desc) { return memory(desc, engine, nullptr); };
  impl_ = std::make_unique<Impl>(Impl{.threads = key.threads,
                                      .implementation = chosen.impl_info_str(),
                                      .scratchpad_bytes = chosen.scratchpad_desc().get_size(),
                                      .stream = dnnl::stream(engine),
                                      .primitive = dnnl::matmul(chosen),
                                      .a = at(a),
                                      .b = at(b),
                                      .bias = key.bias ? at(bias) : memory(),
                                      .c = at(c),
                                      .scratchpad = at(chosen.scratchpad_desc()),
                                      .arguments = {}});
  impl_->arguments = {{DNNL_ARG_SRC, impl_->a},
                      {DNNL_ARG_WEIGHTS, impl_->b},
                      {DNNL_ARG_DST, impl_->c},
                      {DNNL_ARG_SCRATCHPAD, impl_->scratchpad}};
  if (key.bias) impl_->arguments.emplace(DNNL_ARG_BIAS, impl_->bias);
}

Product::~Product() = default;

void Product::Run(const void* a, const void* b, const void* bias, void* c, Scratch* scratchpad) {
  const OmpThreads scope(impl_->threads);
  impl_->a.set_data_handle(const_cast<void*>(a));
  impl_->b.set_data_handle(const_cast<void*>(b));
  if (impl_->bias) impl_->bias.set_data_handle(const_cast<void*>(bias));
  impl_->c.set_data_handle(c);
  impl_->scratchpad.set_data_handle(scratchpad->Bytes(impl_->scratchpad_bytes));
  impl_->primitive.execute(impl_->stream, impl_->arguments);
}

const std::string& Product::implementation() const { return impl_->implementation; }

int ThreadsThatKeepBits(const ProductKey& key) {
  if (!key.transpose_a || key.k < 1024) return key.threads;
  return static_cast<int>(std::clamp<int64_t>(key.n / 64, 1, key.threads));
}

Product* ProductContext::Find(const ProductKey& key) {
  const auto found = kept_.find(key);
  if (found != kept_.end()) return found->second.get();
  if (kept_.size() >= kMostKept) kept_.clear();
  auto product = std::make_unique<Product>(key);
  return kept_.emplace(key, std::move(product)).first->second.get();
}

}  // namespace zeroshard::cpu
