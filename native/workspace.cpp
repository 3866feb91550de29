#include "workspace.h"

#include <cstdlib>
#include <cstring>

namespace partita {
namespace {

struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
};
thread_local Buffer own, shared;
constexpr size_t KEEP = (8 << 20) + (64 << 10);  // eight heads of 4096 keys with 64 features, and some rows

// Under the address sanitizer, memory that is used again holds NaN: no number may depend on what a call left there.
void* forgotten(void* data, [[maybe_unused]] size_t bytes) {
#ifdef __SANITIZE_ADDRESS__
  if (data) std::memset(data, 0xff, bytes);
#endif
  return data;
}

void* grown(Buffer& buffer, size_t bytes) {
  if (bytes > buffer.size) {
    std::free(buffer.data);
    buffer.size = 0;
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(64, rounded);
    if (buffer.data) buffer.size = rounded;
  }
  return forgotten(buffer.data, bytes);
}

}  // namespace

void* thread_workspace(size_t bytes) { return grown(own, bytes); }

SharedWorkspace::SharedWorkspace(size_t bytes) : kept_(bytes <= KEEP) {
  data = kept_ ? grown(shared, bytes) : std::aligned_alloc(64, (bytes + 63) / 64 * 64);
}

SharedWorkspace::~SharedWorkspace() {
  if (!kept_) std::free(data);
}

}  // namespace partita
