// Memory that a call works in and gives back: of each thread, and shared by the threads of a call.
#pragma once
#include <cstddef>
#include <cstdint>

namespace partita {

// Memory of the calling thread, kept between calls: 64-byte aligned, null when memory is exhausted.
void* thread_workspace(size_t bytes);

// Memory that the threads of a call share, for as long as this object lives. Up to 8 MB stay with the calling thread
// for the next call: to take them from the system each time costs a few per cent of a short one, page by page.
class SharedWorkspace {
 public:
  explicit SharedWorkspace(size_t bytes);
  ~SharedWorkspace();
  SharedWorkspace(const SharedWorkspace&) = delete;
  SharedWorkspace& operator=(const SharedWorkspace&) = delete;
  void* data;  // 64-byte aligned, null when memory is exhausted

 private:
  bool kept_;
};

#ifdef PARTITA_ISA  // a template that is not of one instruction set would be merged across them by the linker
namespace PARTITA_ISA {

constexpr int64_t round_up(int64_t a, int64_t b) { return (a + b - 1) / b * b; }

// Hands out pieces of one allocation. Made twice: once with null to count, once with memory.
struct Arena {
  char* base;
  size_t used = 0;
  template <class T>
  T* take(int64_t n) {
    char* p = base ? base + used : nullptr;
    used += static_cast<size_t>(round_up(static_cast<int64_t>(sizeof(T)) * n, 64));
    return reinterpret_cast<T*>(p);
  }
};

}  // namespace PARTITA_ISA
#endif

}  // namespace partita
