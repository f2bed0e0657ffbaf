// torch's allocator of CPU memory, on the arena of this process (csrc/arena.h). allred/torch/arena_allocator.py compiles
// this file against the headers of the torch that is installed, and passes the functions of the arena.
//
// Blocks that the arena does not serve come from the allocator that was set before. free_block frees blocks of both.
// Tensors made before keep their deleter. The new allocator is never destroyed.
#include <c10/core/CPUAllocator.h>

namespace {

void *(*serve)(size_t bytes);  // NULL if the arena does not serve this size, or is full
int (*contains)(const void *address);
void (*release)(void *address);
c10::Allocator *before;

void free_block(void *address) {
  if (!contains(address)) return before->raw_deallocate(address);
  c10::profiledCPUMemoryReporter().Delete(address);
  release(address);
}

struct ArenaAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void *address = serve(bytes);
    if (!address) return before->allocate(bytes);
    c10::profiledCPUMemoryReporter().New(address, bytes);
    return {address, address, free_block, c10::Device(c10::DeviceType::CPU)};
  }

  // Frees blocks of both allocators, for raw_allocate().
  c10::DeleterFnPtr raw_deleter() const override { return free_block; }

  void copy_data(void *to, const void *from, size_t bytes) const override { default_copy_data(to, from, bytes); }
};

}  // namespace

// Returns 0; -1 if the allocator of this program cannot be extended, because it has no raw_deleter().
extern "C" int allred_set_torch_allocator(void *(*serve_bytes)(size_t), int (*contains_address)(const void *),
                                          void (*release_block)(void *)) {
  before = c10::GetCPUAllocator();
  if (!before || !before->raw_deleter()) return -1;
  serve = serve_bytes, contains = contains_address, release = release_block;
  c10::SetCPUAllocator(new ArenaAllocator, 255);
  return 0;
}
