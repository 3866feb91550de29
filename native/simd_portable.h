// Fixed-size arrays that any compiler turns into its own 128-bit vectors.
#pragma once
#include "simd.h"

namespace partita {
namespace PARTITA_ISA {

// Multiplication and addition round
// separately (the build sets -ffp-contract=off), as `fma` below does, so that equal scores stay equal.
template <class A, class I, int BITS, int BIAS>
struct Plain {
  static constexpr int W = 16 / static_cast<int>(sizeof(A));
  static constexpr int ROWS = 6;
  typedef A T __attribute__((vector_size(16)));
  typedef I M __attribute__((vector_size(16)));
  static PARTITA_INLINE T load(const A* p) {
    T r;
    std::memcpy(&r, p, 16);
    return r;
  }
  static PARTITA_INLINE void store(A* p, T a) { std::memcpy(p, &a, 16); }
  static PARTITA_INLINE T set(A x) { return x - T{}; }
  static PARTITA_INLINE T add(T a, T b) { return a + b; }
  static PARTITA_INLINE T sub(T a, T b) { return a - b; }
  static PARTITA_INLINE T mul(T a, T b) { return a * b; }
  static PARTITA_INLINE T div(T a, T b) { return a / b; }
  static PARTITA_INLINE T fma(T a, T b, T c) { return a * b + c; }
  static PARTITA_INLINE T max(T a, T b) { return a > b ? a : b; }
  static PARTITA_INLINE A reduce_sum(T a) {
    A s = a[0];
    for (int i = 1; i < W; ++i) s += a[i];
    return s;
  }
  static PARTITA_INLINE A reduce_max(T a) {
    A s = a[0];
    for (int i = 1; i < W; ++i) s = a[i] > s ? a[i] : s;
    return s;
  }
  static PARTITA_INLINE int count_greater(T a, T b) {
    int n = 0;
    for (int i = 0; i < W; ++i) n += a[i] > b[i];
    return n;
  }
  static PARTITA_INLINE T where_less(T x, T y, T a, T b) { return x < y ? a : b; }
  static constexpr A MAGIC = (sizeof(A) == 4 ? A(12582912.0) : A(6755399441055744.0)) + BIAS, FLOOR = -BIAS;
  static constexpr bool UNDERFLOWS_TO_ZERO = false, ROUNDS_DOWN = false;
  static PARTITA_INLINE T fraction(T x) { return x - ((x + MAGIC) - MAGIC); }
  static PARTITA_INLINE T times_power_of_two(T p, T x) {
    const T t = x + MAGIC;
    M m;
    std::memcpy(&m, &t, 16);
    m = m << BITS;
    T e;
    std::memcpy(&e, &m, 16);
    return p * e;
  }
  static PARTITA_INLINE T interleave_low(T a, T b) {
    T r;
    for (int i = 0; i < W / 2; ++i) {
      r[2 * i] = a[i];
      r[2 * i + 1] = b[i];
    }
    return r;
  }
  static PARTITA_INLINE T interleave_high(T a, T b) {
    T r;
    for (int i = 0; i < W / 2; ++i) {
      r[2 * i] = a[W / 2 + i];
      r[2 * i + 1] = b[W / 2 + i];
    }
    return r;
  }
};
template <>
struct Vec<float> : Plain<float, uint32_t, 23, 127> {};
template <>
struct Vec<double> : Plain<double, uint64_t, 52, 1023> {};

}  // namespace PARTITA_ISA
}  // namespace partita
