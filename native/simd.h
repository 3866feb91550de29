// Vector types: these headers alone know an instruction set. Everything else is written against Vec<float> and
// Vec<double>, whose words `simd_portable.h` defines in plain C++.
//
// Each kernel file is compiled once per instruction set, inside its own namespace PARTITA_ISA, with the flags of that
// set. No standard-library templates here or in the kernels: the linker would keep one copy of them for all sets, and
// it could be the AVX-512 one.
#pragma once
#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif
#if defined(__aarch64__)
#include <arm_neon.h>
#endif

#define PARTITA_INLINE inline __attribute__((always_inline))
#if defined(__x86_64__) || defined(__i386__)
#include <xmmintrin.h>
#define PARTITA_X86 1
#endif

namespace partita {
namespace PARTITA_ISA {

// Numbers below the normal range count as 0 while a kernel runs: they change no sum that starts at 1, and cost 100
// cycles each.
struct FlushDenormals {
#if defined(PARTITA_X86)
  unsigned before = _mm_getcsr();
  FlushDenormals() { _mm_setcsr(before | 0x8040u); }
  ~FlushDenormals() { _mm_setcsr(before); }
#elif defined(__aarch64__)
  uint64_t before;
  FlushDenormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(before));
    __asm__ volatile("msr fpcr, %0" : : "r"(before | (uint64_t{1} << 24)));
  }
  ~FlushDenormals() { __asm__ volatile("msr fpcr, %0" : : "r"(before)); }
#endif
};

template <class A>
struct Vec;

// Two neighbouring bfloat16 numbers: what a lane of a product of pairs takes, where the processor has one.
struct Pair {
  uint16_t low, high;
};

// What the factors of a product are held as: numbers of the type they are summed in, one to a lane, or pairs.
template <class F>
struct Factor {
  using Sum = F;
  static constexpr int STEP = 1;           // numbers to a lane
  static constexpr int BYTES = sizeof(F);  // of a number
  static constexpr int DTYPE =
      sizeof(F) == 4 ? 0 : 1;  // the operands that need no conversion: PARTITA_FLOAT32, _FLOAT64
};
template <>
struct Factor<Pair> {
  using Sum = float;
  static constexpr int STEP = 2, BYTES = 2, DTYPE = 2;  // PARTITA_BFLOAT16
};
template <class F>
using Sum = typename Factor<F>::Sum;

// Lanes that n numbers fill.
template <class F>
constexpr int64_t steps(int64_t n) {
  return (n + Factor<F>::STEP - 1) / Factor<F>::STEP;
}

}  // namespace PARTITA_ISA
}  // namespace partita

#if defined(__AVX512F__)
#include "simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__)
#include "simd_avx2.h"
#elif defined(PARTITA_NEON)
#include "simd_neon.h"
#else
#include "simd_portable.h"
#endif
