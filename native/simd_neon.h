// NEON of 64-bit ARM: 32 registers of 4 floats, fused multiply-add.
#pragma once
#include "simd.h"

namespace partita {
namespace PARTITA_ISA {

template <>
struct Vec<float> {
  using T = float32x4_t;
  static constexpr int W = 4;
  static constexpr int ROWS = 12;  // 12 x 2 vectors = 24 accumulators of 32
  static PARTITA_INLINE T load(const float* p) { return vld1q_f32(p); }
  static PARTITA_INLINE void store(float* p, T a) { vst1q_f32(p, a); }
  static PARTITA_INLINE T set(float x) { return vdupq_n_f32(x); }
  static PARTITA_INLINE T add(T a, T b) { return vaddq_f32(a, b); }
  static PARTITA_INLINE T sub(T a, T b) { return vsubq_f32(a, b); }
  static PARTITA_INLINE T mul(T a, T b) { return vmulq_f32(a, b); }
  static PARTITA_INLINE T div(T a, T b) { return vdivq_f32(a, b); }
  static PARTITA_INLINE T fma(T a, T b, T c) { return vfmaq_f32(c, a, b); }
  // Not vmaxq, which is NaN where either is: of two operands, one NaN, the second is returned, as everywhere here.
  static PARTITA_INLINE T max(T a, T b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
  static PARTITA_INLINE float reduce_sum(T a) { return vaddvq_f32(a); }
  static PARTITA_INLINE float reduce_max(T a) { return vmaxnmvq_f32(a); }
  static PARTITA_INLINE int count_greater(T a, T b) {
    return static_cast<int>(vaddvq_u32(vshrq_n_u32(vcgtq_f32(a, b), 31)));
  }
  static PARTITA_INLINE T where_less(T x, T y, T a, T b) { return vbslq_f32(vcltq_f32(x, y), a, b); }
  // As in simd_avx2.h: the low bits of x + MAGIC hold n + 127.
  static constexpr bool UNDERFLOWS_TO_ZERO = false, ROUNDS_DOWN = false;
  static constexpr float MAGIC = 12582912.0f + 127.0f, FLOOR = -127.0f;
  static PARTITA_INLINE T fraction(T x) { return sub(x, sub(add(x, set(MAGIC)), set(MAGIC))); }
  static PARTITA_INLINE T times_power_of_two(T p, T x) {
    return mul(p, vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(add(x, set(MAGIC))), 23)));
  }
  static PARTITA_INLINE T interleave_low(T a, T b) { return vzip1q_f32(a, b); }
  static PARTITA_INLINE T interleave_high(T a, T b) { return vzip2q_f32(a, b); }
};

template <>
struct Vec<double> {
  using T = float64x2_t;
  static constexpr int W = 2;
  static constexpr int ROWS = 12;
  static PARTITA_INLINE T load(const double* p) { return vld1q_f64(p); }
  static PARTITA_INLINE void store(double* p, T a) { vst1q_f64(p, a); }
  static PARTITA_INLINE T set(double x) { return vdupq_n_f64(x); }
  static PARTITA_INLINE T add(T a, T b) { return vaddq_f64(a, b); }
  static PARTITA_INLINE T sub(T a, T b) { return vsubq_f64(a, b); }
  static PARTITA_INLINE T mul(T a, T b) { return vmulq_f64(a, b); }
  static PARTITA_INLINE T div(T a, T b) { return vdivq_f64(a, b); }
  static PARTITA_INLINE T fma(T a, T b, T c) { return vfmaq_f64(c, a, b); }
  static PARTITA_INLINE T max(T a, T b) { return vbslq_f64(vcgtq_f64(a, b), a, b); }
  static PARTITA_INLINE double reduce_sum(T a) { return vaddvq_f64(a); }
  static PARTITA_INLINE double reduce_max(T a) { return vmaxnmvq_f64(a); }
  static PARTITA_INLINE int count_greater(T a, T b) {
    return static_cast<int>(vaddvq_u64(vshrq_n_u64(vcgtq_f64(a, b), 63)));
  }
  static PARTITA_INLINE T where_less(T x, T y, T a, T b) { return vbslq_f64(vcltq_f64(x, y), a, b); }
  static constexpr bool UNDERFLOWS_TO_ZERO = false;
  static constexpr double MAGIC = 6755399441055744.0 + 1023.0, FLOOR = -1023.0;
  static PARTITA_INLINE T fraction(T x) { return sub(x, sub(add(x, set(MAGIC)), set(MAGIC))); }
  static PARTITA_INLINE T times_power_of_two(T p, T x) {
    return mul(p, vreinterpretq_f64_u64(vshlq_n_u64(vreinterpretq_u64_f64(add(x, set(MAGIC))), 52)));
  }
  static PARTITA_INLINE T interleave_low(T a, T b) { return vzip1q_f64(a, b); }
  static PARTITA_INLINE T interleave_high(T a, T b) { return vzip2q_f64(a, b); }
};

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
// Products of pairs (BFDOT), with sums in float32: the two products of a lane are added before the sum. The processor
// rounds each of them, and each sum, to odd, and counts denormals as 0.
template <>
struct Vec<Pair> {
  using T = uint32x4_t;
  using S = float32x4_t;  // of sums
  static constexpr int W = 4;
  static constexpr int ROWS = Vec<float>::ROWS;
  static PARTITA_INLINE T load(const Pair* p) {
    return vreinterpretq_u32_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)));
  }
  static PARTITA_INLINE void store(Pair* p, T a) {
    vst1q_u16(reinterpret_cast<uint16_t*>(p), vreinterpretq_u16_u32(a));
  }
  static PARTITA_INLINE T set(Pair x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return vdupq_n_u32(bits);
  }
  static PARTITA_INLINE T ones() {
    uint32_t bits = 0x3f803f80;
    __asm__("" : "+r"(bits));  // as a constant, GCC 12 makes it the 1 of float16
    return vdupq_n_u32(bits);
  }
  static PARTITA_INLINE S fma(T a, T b, S c) {
    return vbfdotq_f32(c, vreinterpretq_bf16_u32(a), vreinterpretq_bf16_u32(b));
  }
  static PARTITA_INLINE T interleave_low(T a, T b) { return vzip1q_u32(a, b); }
  static PARTITA_INLINE T interleave_high(T a, T b) { return vzip2q_u32(a, b); }
  // 8 numbers in order, rounded to nearest even
  static PARTITA_INLINE T round(S first, S second) {
    return vreinterpretq_u32_bf16(vcvtq_high_bf16_f32(vcvtq_low_bf16_f32(first), second));
  }
  // 4 pairs (even[i], odd[i]), rounded
  static PARTITA_INLINE T zip(S even, S odd) {
    const uint16x8_t both = vreinterpretq_u16_u32(round(even, odd));
    return vreinterpretq_u32_u16(vzip1q_u16(both, vextq_u16(both, both, 4)));
  }
};
#define PARTITA_PAIRS 1
#endif

}  // namespace PARTITA_ISA
}  // namespace partita
