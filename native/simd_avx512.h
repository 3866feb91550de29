// AVX-512: 32 registers of 16 floats. The zero-masking forms with a full mask stand for intrinsics whose plain form
// warns in GCC 12's own headers.
#pragma once
#include "simd.h"

namespace partita {
namespace PARTITA_ISA {

template <>
struct Vec<float> {
  using T = __m512;
  static constexpr int W = 16;
  static constexpr int ROWS = 14;  // rows of the register block: 14 x 2 vectors = 28 accumulators of 32
  static PARTITA_INLINE T load(const float* p) { return _mm512_loadu_ps(p); }
  static PARTITA_INLINE void store(float* p, T a) { _mm512_storeu_ps(p, a); }
  static PARTITA_INLINE T set(float x) { return _mm512_set1_ps(x); }
  static PARTITA_INLINE T add(T a, T b) { return _mm512_add_ps(a, b); }
  static PARTITA_INLINE T sub(T a, T b) { return _mm512_sub_ps(a, b); }
  static PARTITA_INLINE T mul(T a, T b) { return _mm512_mul_ps(a, b); }
  static PARTITA_INLINE T div(T a, T b) { return _mm512_div_ps(a, b); }
  static PARTITA_INLINE T fma(T a, T b, T c) { return _mm512_fmadd_ps(a, b, c); }
  // Of two operands, one NaN, the second is returned: max(bound, x) keeps a NaN x.
  static PARTITA_INLINE T max(T a, T b) { return _mm512_maskz_max_ps(0xffff, a, b); }
  template <int HALF>
  static PARTITA_INLINE __m256 half(T a) {
    return _mm256_castpd_ps(_mm512_maskz_extractf64x4_pd(0xf, _mm512_castps_pd(a), HALF));
  }
  static PARTITA_INLINE float reduce_sum(T a) {
    const __m256 h = _mm256_add_ps(half<0>(a), half<1>(a));
    __m128 b = _mm_add_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    b = _mm_add_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_add_ss(b, _mm_movehdup_ps(b)));
  }
  static PARTITA_INLINE float reduce_max(T a) {
    const __m256 h = _mm256_max_ps(half<0>(a), half<1>(a));
    __m128 b = _mm_max_ps(_mm256_castps256_ps128(h), _mm256_extractf128_ps(h, 1));
    b = _mm_max_ps(b, _mm_movehl_ps(b, b));
    return _mm_cvtss_f32(_mm_max_ss(b, _mm_movehdup_ps(b)));
  }
  static PARTITA_INLINE int count_greater(T a, T b) { return __builtin_popcount(_mm512_cmp_ps_mask(a, b, _CMP_GT_OQ)); }
  // x < y ? a : b, per lane
  static PARTITA_INLINE T where_less(T x, T y, T a, T b) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(x, y, _CMP_LT_OQ), b, a);
  }
  // x = n + r with n an integer: r, and p * 2^n, exactly 0 at x = FLOOR and, where UNDERFLOWS_TO_ZERO, at any finite x
  // below it. scalef rounds down by itself, so r is in [0, 1).
  static constexpr bool UNDERFLOWS_TO_ZERO = true, ROUNDS_DOWN = true;
  static constexpr float FLOOR = -1000.0f;
  static PARTITA_INLINE T fraction(T x) { return _mm512_maskz_reduce_ps(0xffff, x, 1); }
  static PARTITA_INLINE T times_power_of_two(T p, T x) { return _mm512_maskz_scalef_ps(0xffff, p, x); }
  static PARTITA_INLINE T interleave_low(T a, T b) {
    return _mm512_permutex2var_ps(a, _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), b);
  }
  static PARTITA_INLINE T interleave_high(T a, T b) {
    return _mm512_permutex2var_ps(a, _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31),
                                  b);
  }
};

template <>
struct Vec<double> {
  using T = __m512d;
  static constexpr int W = 8;
  static constexpr int ROWS = 14;
  static PARTITA_INLINE T load(const double* p) { return _mm512_loadu_pd(p); }
  static PARTITA_INLINE void store(double* p, T a) { _mm512_storeu_pd(p, a); }
  static PARTITA_INLINE T set(double x) { return _mm512_set1_pd(x); }
  static PARTITA_INLINE T add(T a, T b) { return _mm512_add_pd(a, b); }
  static PARTITA_INLINE T sub(T a, T b) { return _mm512_sub_pd(a, b); }
  static PARTITA_INLINE T mul(T a, T b) { return _mm512_mul_pd(a, b); }
  static PARTITA_INLINE T div(T a, T b) { return _mm512_div_pd(a, b); }
  static PARTITA_INLINE T fma(T a, T b, T c) { return _mm512_fmadd_pd(a, b, c); }
  static PARTITA_INLINE T max(T a, T b) { return _mm512_maskz_max_pd(0xff, a, b); }
  static PARTITA_INLINE double reduce_sum(T a) {
    const __m256d h = _mm256_add_pd(_mm512_maskz_extractf64x4_pd(0xf, a, 0), _mm512_maskz_extractf64x4_pd(0xf, a, 1));
    const __m128d b = _mm_add_pd(_mm256_castpd256_pd128(h), _mm256_extractf128_pd(h, 1));
    return _mm_cvtsd_f64(_mm_add_sd(b, _mm_unpackhi_pd(b, b)));
  }
  static PARTITA_INLINE double reduce_max(T a) {
    const __m256d h = _mm256_max_pd(_mm512_maskz_extractf64x4_pd(0xf, a, 0), _mm512_maskz_extractf64x4_pd(0xf, a, 1));
    const __m128d b = _mm_max_pd(_mm256_castpd256_pd128(h), _mm256_extractf128_pd(h, 1));
    return _mm_cvtsd_f64(_mm_max_sd(b, _mm_unpackhi_pd(b, b)));
  }
  static PARTITA_INLINE int count_greater(T a, T b) { return __builtin_popcount(_mm512_cmp_pd_mask(a, b, _CMP_GT_OQ)); }
  static PARTITA_INLINE T where_less(T x, T y, T a, T b) {
    return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(x, y, _CMP_LT_OQ), b, a);
  }
  static constexpr bool UNDERFLOWS_TO_ZERO = true;
  static constexpr double MAGIC = 6755399441055744.0, FLOOR = -5000.0;
  static PARTITA_INLINE T nearest(T x) { return sub(add(x, set(MAGIC)), set(MAGIC)); }
  static PARTITA_INLINE T fraction(T x) { return sub(x, nearest(x)); }
  static PARTITA_INLINE T times_power_of_two(T p, T x) { return _mm512_maskz_scalef_pd(0xff, p, nearest(x)); }
  static PARTITA_INLINE T interleave_low(T a, T b) {
    return _mm512_permutex2var_pd(a, _mm512_setr_epi64(0, 8, 1, 9, 2, 10, 3, 11), b);
  }
  static PARTITA_INLINE T interleave_high(T a, T b) {
    return _mm512_permutex2var_pd(a, _mm512_setr_epi64(4, 12, 5, 13, 6, 14, 7, 15), b);
  }
};

#if defined(__AVX512BF16__)
// Products of pairs, with sums in float32: the two products of a lane are added before the sum. Denormal factors and
// results count as 0.
template <>
struct Vec<Pair> {
  using T = __m512i;
  using S = __m512;  // of sums
  static constexpr int W = 16;
  static constexpr int ROWS = Vec<float>::ROWS;
  static PARTITA_INLINE T load(const Pair* p) { return _mm512_loadu_si512(p); }
  static PARTITA_INLINE void store(Pair* p, T a) { _mm512_storeu_si512(p, a); }
  static PARTITA_INLINE T set(Pair x) {
    int32_t bits;
    std::memcpy(&bits, &x, 4);
    return _mm512_set1_epi32(bits);
  }
  static PARTITA_INLINE T ones() { return _mm512_set1_epi32(0x3f803f80); }
  static PARTITA_INLINE S fma(T a, T b, S c) { return _mm512_dpbf16_ps(c, (__m512bh)a, (__m512bh)b); }
  static PARTITA_INLINE T interleave_low(T a, T b) {
    return _mm512_permutex2var_epi32(a, _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23), b);
  }
  static PARTITA_INLINE T interleave_high(T a, T b) {
    return _mm512_permutex2var_epi32(a, _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31),
                                     b);
  }
  // 32 numbers in order, rounded to nearest even
  static PARTITA_INLINE T round(S first, S second) { return (__m512i)_mm512_cvtne2ps_pbh(second, first); }
  // 16 pairs (even[i], odd[i]), rounded
  static PARTITA_INLINE T zip(S even, S odd) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return _mm512_permutexvar_epi16(order, round(even, odd));
  }
};
#define PARTITA_PAIRS 1
#endif

}  // namespace PARTITA_ISA
}  // namespace partita
