// AVX2 with fused multiply-add: 16 registers of 8 floats.
#pragma once
#include "simd.h"

namespace partita {
namespace PARTITA_ISA {

template <>
struct Vec<float> {
  using T = __m256;
  static constexpr int W = 8;
  static constexpr int ROWS = 6;  // 6 x 2 vectors = 12 accumulators of 16
  static PARTITA_INLINE T load(const float* p) { return _mm256_loadu_ps(p); }
  static PARTITA_INLINE void store(float* p, T a) { _mm256_storeu_ps(p, a); }
  static PARTITA_INLINE T set(float x) { return _mm256_set1_ps(x); }
  static PARTITA_INLINE T add(T a, T b) { return _mm256_add_ps(a, b); }
  static PARTITA_INLINE T sub(T a, T b) { return _mm256_sub_ps(a, b); }
  static PARTITA_INLINE T mul(T a, T b) { return _mm256_mul_ps(a, b); }
  static PARTITA_INLINE T div(T a, T b) { return _mm256_div_ps(a, b); }
  static PARTITA_INLINE T fma(T a, T b, T c) { return _mm256_fmadd_ps(a, b, c); }
  static PARTITA_INLINE T max(T a, T b) { return _mm256_max_ps(a, b); }
  static PARTITA_INLINE float reduce_sum(T a) {
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
  }
  static PARTITA_INLINE float reduce_max(T a) {
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
  }
  static PARTITA_INLINE int count_greater(T a, T b) {
    return __builtin_popcount(static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ))));
  }
  static PARTITA_INLINE T where_less(T x, T y, T a, T b) {
    return _mm256_blendv_ps(b, a, _mm256_cmp_ps(x, y, _CMP_LT_OQ));
  }
  // The low bits of x + MAGIC hold n + 127: shifted to the exponent they are 2^n, and exactly 0 at n = -127.
  static constexpr bool UNDERFLOWS_TO_ZERO = false, ROUNDS_DOWN = false;
  static constexpr float MAGIC = 12582912.0f + 127.0f, FLOOR = -127.0f;
  static PARTITA_INLINE T fraction(T x) { return sub(x, sub(add(x, set(MAGIC)), set(MAGIC))); }
  static PARTITA_INLINE T times_power_of_two(T p, T x) {
    return _mm256_mul_ps(p, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(add(x, set(MAGIC))), 23)));
  }
  static PARTITA_INLINE T interleave_low(T a, T b) {
    const T x = _mm256_unpacklo_ps(a, b), y = _mm256_unpackhi_ps(a, b);
    return _mm256_permute2f128_ps(x, y, 0x20);
  }
  static PARTITA_INLINE T interleave_high(T a, T b) {
    const T x = _mm256_unpacklo_ps(a, b), y = _mm256_unpackhi_ps(a, b);
    return _mm256_permute2f128_ps(x, y, 0x31);
  }
};

template <>
struct Vec<double> {
  using T = __m256d;
  static constexpr int W = 4;
  static constexpr int ROWS = 6;
  static PARTITA_INLINE T load(const double* p) { return _mm256_loadu_pd(p); }
  static PARTITA_INLINE void store(double* p, T a) { _mm256_storeu_pd(p, a); }
  static PARTITA_INLINE T set(double x) { return _mm256_set1_pd(x); }
  static PARTITA_INLINE T add(T a, T b) { return _mm256_add_pd(a, b); }
  static PARTITA_INLINE T sub(T a, T b) { return _mm256_sub_pd(a, b); }
  static PARTITA_INLINE T mul(T a, T b) { return _mm256_mul_pd(a, b); }
  static PARTITA_INLINE T div(T a, T b) { return _mm256_div_pd(a, b); }
  static PARTITA_INLINE T fma(T a, T b, T c) { return _mm256_fmadd_pd(a, b, c); }
  static PARTITA_INLINE T max(T a, T b) { return _mm256_max_pd(a, b); }
  static PARTITA_INLINE double reduce_sum(T a) {
    const __m128d b = _mm_add_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_add_sd(b, _mm_unpackhi_pd(b, b)));
  }
  static PARTITA_INLINE double reduce_max(T a) {
    const __m128d b = _mm_max_pd(_mm256_castpd256_pd128(a), _mm256_extractf128_pd(a, 1));
    return _mm_cvtsd_f64(_mm_max_sd(b, _mm_unpackhi_pd(b, b)));
  }
  static PARTITA_INLINE int count_greater(T a, T b) {
    return __builtin_popcount(static_cast<unsigned>(_mm256_movemask_pd(_mm256_cmp_pd(a, b, _CMP_GT_OQ))));
  }
  static PARTITA_INLINE T where_less(T x, T y, T a, T b) {
    return _mm256_blendv_pd(b, a, _mm256_cmp_pd(x, y, _CMP_LT_OQ));
  }
  static constexpr bool UNDERFLOWS_TO_ZERO = false;
  static constexpr double MAGIC = 6755399441055744.0 + 1023.0, FLOOR = -1023.0;
  static PARTITA_INLINE T fraction(T x) { return sub(x, sub(add(x, set(MAGIC)), set(MAGIC))); }
  static PARTITA_INLINE T times_power_of_two(T p, T x) {
    return _mm256_mul_pd(p, _mm256_castsi256_pd(_mm256_slli_epi64(_mm256_castpd_si256(add(x, set(MAGIC))), 52)));
  }
  static PARTITA_INLINE T interleave_low(T a, T b) {
    return _mm256_permute2f128_pd(_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b), 0x20);
  }
  static PARTITA_INLINE T interleave_high(T a, T b) {
    return _mm256_permute2f128_pd(_mm256_unpacklo_pd(a, b), _mm256_unpackhi_pd(a, b), 0x31);
  }
};

}  // namespace PARTITA_ISA
}  // namespace partita
