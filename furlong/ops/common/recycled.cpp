#include "furlong/ops/common/recycled.h"

#include <ATen/EmptyTensor.h>
#include <c10/core/CPUAllocator.h>
#ifdef __linux__
#include <sys/mman.h>
#endif

#include <cstdlib>
#include <list>
#include <mutex>
#include <new>

namespace furlong {

namespace {

constexpr size_t kHugePage = size_t{2} << 20;
constexpr size_t kSmallest = size_t{1} << 20;
constexpr size_t kStep = size_t{64} << 10;

struct Block {
  void* data;
  size_t bytes;
};

Block new_block(size_t bytes) {
  void* data = nullptr;
  if (posix_memalign(&data, kHugePage, bytes) != 0) throw std::bad_alloc();
#ifdef __linux__
  madvise(data, bytes / kHugePage * kHugePage, MADV_HUGEPAGE);
#endif
  return {data, bytes};
}

class RecyclingAllocator : public c10::Allocator {
 public:
  c10::DataPtr allocate(size_t bytes) override {
    if (bytes < kSmallest) return c10::GetCPUAllocator()->allocate(bytes);
    auto* block = new Block(take((bytes + kStep - 1) / kStep * kStep));
    return {block->data, block, &give_back, c10::Device(c10::DeviceType::CPU)};
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { default_copy_data(to, from, bytes); }

  RecycledBytes bytes() {
    const std::lock_guard lock(mutex_);
    return {in_use_, idle_bytes_};
  }

 private:
  using Blocks = std::list<Block>;

  static void give_back(void* block);

  Block take(size_t bytes) {
    const std::lock_guard lock(mutex_);
    auto best = idle_.end();
    for (auto block = idle_.begin(); block != idle_.end(); ++block) {
      const bool fits = block->bytes >= bytes && block->bytes <= bytes + bytes / 8;
      if (fits && (best == idle_.end() || block->bytes <= best->bytes)) best = block;
    }
    const Block block = best != idle_.end() ? remove(best) : fresh(bytes);
    in_use_ += static_cast<int64_t>(block.bytes);
    return block;
  }

  Block fresh(size_t bytes) {
    for (size_t returned = 0; returned < bytes && !idle_.empty();) {
      const Block oldest = remove(idle_.begin());
      returned += oldest.bytes;
      std::free(oldest.data);
    }
    return new_block(bytes);
  }

  void keep(const Block& block) {
    const std::lock_guard lock(mutex_);
    in_use_ -= static_cast<int64_t>(block.bytes);
    idle_.push_back(block);
    idle_bytes_ += static_cast<int64_t>(block.bytes);
    while (idle_bytes_ > kMostIdleBytes) std::free(remove(idle_.begin()).data);
  }

  Block remove(Blocks::iterator block) {
    const Block removed = *block;
    idle_.erase(block);
    idle_bytes_ -= static_cast<int64_t>(removed.bytes);
    return removed;
  }

  std::mutex mutex_;
  Blocks idle_;  // the one that has waited longest first
  int64_t in_use_ = 0, idle_bytes_ = 0;
};

/// Never destroyed: tensors may outlive any static object.
RecyclingAllocator& recycling_allocator() {
  static auto* const allocator = new RecyclingAllocator;
  return *allocator;
}

void RecyclingAllocator::give_back(void* block) {
  const auto* freed = static_cast<Block*>(block);
  recycling_allocator().keep(*freed);
  delete freed;
}

}  // namespace

at::Tensor empty_recycled(at::IntArrayRef sizes, at::ScalarType dtype) {
  return at::detail::empty_generic(sizes, &recycling_allocator(), c10::DispatchKeySet(c10::DispatchKey::CPU), dtype,
                                   std::nullopt);
}

RecycledBytes recycled_bytes() {
  return recycling_allocator().bytes();
}

}  // namespace furlong
