#include "workspace.h"

#include <cstdlib>

namespace partita {
namespace {

struct Buffer {
  void* data = nullptr;
  size_t size = 0;
  ~Buffer() { std::free(data); }
};
thread_local Buffer own, shared;
constexpr size_t KEEP = (8 << 20) + (64 << 10);  // eight heads of 4096 keys with 64 features, and some rows

void* grown(Buffer& buffer, size_t bytes) {
  if (bytes > buffer.size) {
    std::free(buffer.data);
    buffer.size = 0;
    const size_t rounded = (bytes + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(64, rounded);
    if (buffer.data) buffer.size = rounded;
  }
  return buffer.data;
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
