// Exponential and hyperbolic tangent of a vector, and the units scores are held in.
//
// Inside the kernels scores are in base 2 (natural score times log2 e, folded into the query), which saves the range
// reduction one multiplication and its second constant. `natural` and `binary` convert a peak there and back.
#pragma once
#include <cmath>

#include "simd.h"

namespace partita {
namespace PARTITA_ISA {

constexpr double LOG2E = 1.4426950408889634074;
constexpr double LN2 = 0.69314718055994530942;

template <class A>
PARTITA_INLINE A neg_inf() {
  return -static_cast<A>(__builtin_inf());
}

// 2^r for r in [0, 1) or [-1/2, 1/2], as `fraction` gives it: float to 0.7 ulp (minimax fits of the relative error,
// constant pinned to 1), double by its Taylor series.
PARTITA_INLINE Vec<float>::T exp2_poly(Vec<float>::T r) {
  using V = Vec<float>;
  constexpr bool D = V::ROUNDS_DOWN;
  V::T p = V::set(D ? 0.00021565972f : 0.0001532647f);
  p = V::fma(p, r, V::set(D ? 0.001248229f : 0.0013390807f));
  p = V::fma(p, r, V::set(D ? 0.009673775f : 0.009618506f));
  p = V::fma(p, r, V::set(D ? 0.055486184f : 0.0555036f));
  p = V::fma(p, r, V::set(D ? 0.24022909f : 0.24022648f));
  p = V::fma(p, r, V::set(D ? 0.69314706f : 0.6931472f));
  return V::fma(p, r, V::set(1.0f));
}
PARTITA_INLINE Vec<double>::T exp2_poly(Vec<double>::T r) {
  using V = Vec<double>;
  V::T p = V::set(1.3691488853904128881e-12);
  p = V::fma(p, r, V::set(2.5678435993488205142e-11));
  p = V::fma(p, r, V::set(4.4455382718708114976e-10));
  p = V::fma(p, r, V::set(7.0549116208011233299e-9));
  p = V::fma(p, r, V::set(1.0178086009239699728e-7));
  p = V::fma(p, r, V::set(1.3215486790144309488e-6));
  p = V::fma(p, r, V::set(1.5252733804059840280e-5));
  p = V::fma(p, r, V::set(1.5403530393381609954e-4));
  p = V::fma(p, r, V::set(1.3333558146428443423e-3));
  p = V::fma(p, r, V::set(9.6181291076284771619e-3));
  p = V::fma(p, r, V::set(5.5504108664821579953e-2));
  p = V::fma(p, r, V::set(0.24022650695910071233));
  p = V::fma(p, r, V::set(0.69314718055994530942));
  return V::fma(p, r, V::set(1.0));
}

// The sum (or largest) of the lanes of each of W vectors, which get(i) gives: W numbers for the price of four sums.
template <class A, bool SUM, class Get>
PARTITA_INLINE typename Vec<A>::T reduce_lanes(const Get& get) {
  using V = Vec<A>;
  typename V::T a[V::W];
#pragma GCC unroll 16
  for (int i = 0; i < V::W; ++i) a[i] = get(i);
#pragma GCC unroll 4
  for (int n = V::W / 2; n > 0; n /= 2) {
#pragma GCC unroll 8
    for (int i = 0; i < n; ++i) {
      const typename V::T x = V::interleave_low(a[i], a[i + n]), y = V::interleave_high(a[i], a[i + n]);
      a[i] = SUM ? V::add(x, y) : V::max(x, y);
    }
  }
  return a[0];
}

// x raised to the smallest exponent that matters, so that -inf gives exactly 0; a NaN stays NaN.
template <class A>
PARTITA_INLINE typename Vec<A>::T bounded(typename Vec<A>::T x) {
  return Vec<A>::max(Vec<A>::set(Vec<A>::FLOOR), x);
}

// The same, only where it is needed: MAYBE where x may be -inf.
template <class A, bool MAYBE>
PARTITA_INLINE typename Vec<A>::T bounded_if(typename Vec<A>::T x) {
  return MAYBE || !Vec<A>::UNDERFLOWS_TO_ZERO ? bounded<A>(x) : x;
}

// 2^x for x < 128 (1024) that is bounded or, where that is enough, finite.
template <class A>
PARTITA_INLINE typename Vec<A>::T exp2_bounded(typename Vec<A>::T x) {
  using V = Vec<A>;
  return V::times_power_of_two(exp2_poly(V::fraction(x)), x);
}

template <class A>
PARTITA_INLINE A exp2_one(A x) {
  A lane[Vec<A>::W];
  Vec<A>::store(lane, exp2_bounded<A>(bounded<A>(Vec<A>::set(x))));
  return lane[0];
}

// log x for x >= 1, or NaN. A call of the library for each lane costs more than the sums of a short row.
template <class A>
PARTITA_INLINE typename Vec<A>::T log_above_one(typename Vec<A>::T x) {
  using V = Vec<A>;
  alignas(64) A lane[V::W];
  V::store(lane, x);
  for (int i = 0; i < V::W; ++i) lane[i] = std::log(lane[i]);
  return V::load(lane);
}

// log((1 + r) 2^e) with 1 + r in [sqrt 1/2, sqrt 2); coefficients of log(1 + r) from Cephes, log 2 in two parts.
PARTITA_INLINE Vec<float>::T log_from_mantissa(Vec<float>::T r, Vec<float>::T e) {
  using V = Vec<float>;
  const V::T z = V::mul(r, r);
  V::T p = V::set(7.0376836292e-2f);
  p = V::fma(p, r, V::set(-1.1514610310e-1f));
  p = V::fma(p, r, V::set(1.1676998740e-1f));
  p = V::fma(p, r, V::set(-1.2420140846e-1f));
  p = V::fma(p, r, V::set(1.4249322787e-1f));
  p = V::fma(p, r, V::set(-1.6668057665e-1f));
  p = V::fma(p, r, V::set(2.0000714765e-1f));
  p = V::fma(p, r, V::set(-2.4999993993e-1f));
  p = V::fma(p, r, V::set(3.3333331174e-1f));
  V::T y = V::fma(e, V::set(-2.12194440e-4f), V::mul(V::mul(p, r), z));
  y = V::fma(z, V::set(-0.5f), y);
  return V::fma(e, V::set(0.693359375f), V::add(r, y));
}

#if defined(__AVX512F__)
template <>
PARTITA_INLINE Vec<float>::T log_above_one<float>(Vec<float>::T x) {
  using V = Vec<float>;
  const V::T one = V::set(1.0f), root = V::set(1.41421356f);
  V::T m = _mm512_maskz_getmant_ps(0xffff, x, _MM_MANT_NORM_1_2, _MM_MANT_SIGN_zero);
  V::T e = _mm512_maskz_getexp_ps(0xffff, x);
  e = V::where_less(root, m, V::add(e, one), e);
  m = V::where_less(root, m, V::mul(m, V::set(0.5f)), m);
  return log_from_mantissa(V::sub(m, one), e);
}
#endif

// tanh: a polynomial (rational in double) near 0, where 1 - 2 / (e^2x + 1) would cancel. Coefficients from Cephes.
PARTITA_INLINE Vec<float>::T tanh_small(Vec<float>::T x) {
  using V = Vec<float>;
  const V::T z = V::mul(x, x);
  V::T p = V::set(-5.70498872745e-3f);
  p = V::fma(p, z, V::set(2.06390887954e-2f));
  p = V::fma(p, z, V::set(-5.37397155531e-2f));
  p = V::fma(p, z, V::set(1.33314422036e-1f));
  p = V::fma(p, z, V::set(-3.33332819422e-1f));
  return V::fma(V::mul(p, z), x, x);
}
PARTITA_INLINE Vec<double>::T tanh_small(Vec<double>::T x) {
  using V = Vec<double>;
  const V::T z = V::mul(x, x);
  V::T p = V::set(-9.64399179425052238628e-1);
  p = V::fma(p, z, V::set(-9.92877231001918586564e1));
  p = V::fma(p, z, V::set(-1.61468768441708447952e3));
  V::T q = V::add(z, V::set(1.12811678491632931402e2));
  q = V::fma(q, z, V::set(2.23548839060100448583e3));
  q = V::fma(q, z, V::set(4.84406305325125486048e3));
  return V::fma(V::mul(V::div(p, q), z), x, x);
}
template <class A>
PARTITA_INLINE typename Vec<A>::T tanh(typename Vec<A>::T x) {
  using V = Vec<A>;
  const typename V::T zero = V::set(0), one = V::set(1);
  const typename V::T size = V::max(V::sub(zero, x), x);
  // e^-2|x| in (0, 1]: tanh |x| = (1 - e) / (1 + e), no overflow for any x
  const typename V::T e = exp2_bounded<A>(bounded<A>(V::mul(size, V::set(static_cast<A>(-2 * LOG2E)))));
  const typename V::T big = V::div(V::sub(one, e), V::add(one, e));
  const typename V::T far = V::where_less(x, zero, V::sub(zero, big), big);
  return V::where_less(size, V::set(static_cast<A>(0.625)), tanh_small(x), far);
}

}  // namespace PARTITA_ISA
}  // namespace partita
