// From the sums of a row, lane by lane and relative to its reference, to what a call gives: relative to the peak, in
// natural units, with the statistics and the mean value if they are wanted.
#pragma once
#include <initializer_list>

#include "online_softmax.h"

namespace partita {
namespace PARTITA_ISA {

// The sums of W rows over all their keys, relative to their peaks; the spread is about the mean.
template <class A>
struct RowTotals {
  alignas(64) A peak[Vec<A>::W];
  A mass[Vec<A>::W], first[Vec<A>::W], spread[Vec<A>::W];
  A ratio[Vec<A>::W], scale[Vec<A>::W];  // of the moment: to be relative to the peak, and as it is given
  A log_mass[Vec<A>::W], mean[Vec<A>::W], variance[Vec<A>::W];  // of the scores less the peak, in natural units
};

// The sums of rows r, r + 1, ... (W of them, the last one repeated) over their lanes.
template <class F>
inline void sum_lanes(const RowStates<F>& t, int64_t r, int64_t rows, bool moments, bool rounded, bool mean,
                      RowTotals<Sum<F>>& to) {
  using A = Sum<F>;
  using V = Vec<A>;
  using T = typename V::T;
  const auto row = [&](int i) { return r + i < rows ? r + i : rows - 1; };
  const auto lanes = [&](const A* of, int i) { return V::load(of + row(i) * V::W); };
  const T zero = V::set(0), one = V::set(1), total = reduce_lanes<A, true>([&](int i) { return lanes(t.mass, i); });
  for (int i = 0; i < V::W; ++i) to.peak[i] = t.peak[row(i)];
  V::store(to.mass, total);
  for (A* x : {to.first, to.spread, to.log_mass, to.mean, to.variance}) V::store(x, zero);
  // A moment of rounded weights is divided by their mass, times that of the others.
  T weights = total, rounding = one;
  if (rounded) {
    weights = reduce_lanes<A, true>([&](int i) { return lanes(t.rounded, i); });
    rounding = V::where_less(zero, total, V::div(total, weights), one);
  }
  V::store(to.ratio, rounding);
  V::store(to.scale, mean ? V::where_less(zero, total, V::div(one, weights), one) : rounding);
  if (!moments) return;
  const T linear = reduce_lanes<A, true>([&](int i) { return lanes(t.first, i); });
  alignas(64) A references[V::W], centres[V::W];
  for (int i = 0; i < V::W; ++i) references[i] = t.reference[row(i)], centres[i] = t.centre[row(i)];
  const T reference = V::load(references), middle = V::add(reference, V::div(linear, total));
  // from the centre to the mean: what is taken off is small, since they are near each other
  const T about = recentre<A>(reduce_lanes<A, true>([&](int i) { return lanes(t.second, i); }), linear, total,
                              reference, V::load(centres), middle);
  // from the reference to the peak, whose own exponential is 1: rounding must not take the mass below it
  const T d = V::where_less(zero, total, V::sub(reference, V::load(to.peak)), zero),
          ratio = exp2_bounded<A>(bounded<A>(d));
  const T mass = V::where_less(zero, total, V::max(one, V::mul(ratio, total)), total);
  const T first = V::mul(ratio, V::fma(d, total, linear)),
          spread = V::where_less(zero, total, V::max(zero, V::mul(ratio, about)), zero);
  const T ln2 = V::set(static_cast<A>(LN2)), by = V::where_less(zero, total, mass, one);  // sums of an empty row are 0
  V::store(to.mass, mass);
  V::store(to.first, first);
  V::store(to.spread, spread);
  V::store(to.ratio, V::mul(ratio, rounding));
  V::store(to.log_mass, V::where_less(zero, total, log_above_one<A>(mass), zero));
  V::store(to.mean, V::div(V::mul(first, ln2), by));
  V::store(to.variance, V::div(V::mul(spread, V::mul(ln2, ln2)), by));
  if (!mean) V::store(to.scale, V::mul(ratio, rounding));
}

// What else of each row is kept where it is wanted: counts, its target's score and its best key.
template <class A>
struct RowExtras {
  int64_t count[Vec<A>::W], rank[Vec<A>::W], argmax[Vec<A>::W];
  alignas(64) A target[Vec<A>::W];  // in base 2
};

#if defined(PARTITA_PAIRS)
// The mean value of a row, rounded to bfloat16.
PARTITA_INLINE bool write_rounded(const float* from, int64_t n, float scale, uint16_t* out) {
  using V = Vec<float>;
  const V::T zero = V::set(0), by = V::set(scale);
  V::T bad = zero;
  int64_t v = 0;
  const auto next = [&] {
    const V::T a = V::mul(V::load(from + v), by), b = v + V::W < n ? V::mul(V::load(from + v + V::W), by) : zero;
    bad = V::fma(b, zero, V::fma(a, zero, bad));
    return Vec<Pair>::round(a, b);
  };
  for (; v + 2 * V::W <= n; v += 2 * V::W) Vec<Pair>::store(reinterpret_cast<Pair*>(out + v), next());
  if (v < n) {
    Pair pairs[V::W];
    Vec<Pair>::store(pairs, next());
    std::memcpy(out + v, pairs, sizeof(uint16_t) * static_cast<size_t>(n - v));
  }
  return V::reduce_sum(bad) == 0;
}
#endif

// The mean value or moment of a row, as it is given.
template <class A>
PARTITA_INLINE bool write_moment(const PartitaProblem& p, const PartitaSums& to, const Row& row, const A* moment,
                                 A scale) {
  using V = Vec<A>;
  const int64_t at = to.moment_offset[row.entry] + row.index * to.moment_row;
#if defined(PARTITA_PAIRS)
  if constexpr (sizeof(A) == 4)
    if (to.mean == 2) return write_rounded(moment, p.V, scale, static_cast<uint16_t*>(to.moment) + at);
#endif
  A* out = static_cast<A*>(to.moment) + at;
  const typename V::T zero = V::set(0), by = V::set(scale);
  typename V::T bad = zero;
  int64_t v = 0;
  for (; v + V::W <= p.V; v += V::W) {
    const typename V::T x = V::mul(V::load(moment + v), by);
    bad = V::fma(x, zero, bad);
    V::store(out + v, x);
  }
  A probe = V::reduce_sum(bad);
  for (; v < p.V; ++v) probe += (out[v] = moment[v] * scale) * 0;
  return probe == 0;
}

// n finished rows, up to W, in natural units; of, extras and moment hold whole vectors of rows. The peak is given in
// double: backward must find the very number again that the sums are relative to.
template <class A>
inline bool write_rows(const PartitaProblem& p, const PartitaSums& to, const Row* row, int n, const RowTotals<A>& of,
                       const RowExtras<A>& extras, const A* moment, int64_t ldm) {
  using V = Vec<A>;
  using T = typename V::T;
  const bool in_order = n == V::W && row[n - 1].out - row[0].out == n - 1;
  const auto put = [&](void* where, int64_t at, T x) {
    A* out = static_cast<A*>(where) + at;
    if (in_order) return V::store(out + row[0].out, x);
    alignas(64) A lane[V::W];
    V::store(lane, x);
    for (int i = 0; i < n; ++i) out[row[i].out] = lane[i];
  };
  const auto natural = [](const A* x, int i) { return static_cast<double>(x[i]) * LN2; };  // all round alike
  const auto each = [&](auto* where, const auto& get) {
    if (!where) return;
    for (int i = 0; i < n; ++i) where[row[i].out] = get(i);
  };
  const auto rounded = [&](const A* x) {
    alignas(64) A lane[V::W];
    for (int i = 0; i < V::W; ++i) lane[i] = static_cast<A>(natural(x, i));
    return V::load(lane);
  };
  const T zero = V::set(0), ln2 = V::set(static_cast<A>(LN2)), peak = V::load(of.peak), mass = V::load(of.mass),
          first = V::mul(V::load(of.first), ln2), spread = V::mul(V::load(of.spread), V::mul(ln2, ln2));
  each(static_cast<double*>(to.peak), [&](int i) { return natural(of.peak, i); });
  if (to.mass) put(to.mass, 0, mass);
  if (to.first) put(to.first, 0, first);
  if (to.second) put(to.second, 0, spread);
  each(static_cast<A*>(to.count), [&](int i) { return static_cast<A>(extras.count[i]); });
  each(to.rank, [&](int i) { return extras.rank[i]; });
  each(to.argmax, [&](int i) { return extras.argmax[i]; });
  if (to.target_score) put(to.target_score, 0, rounded(extras.target));
  if (to.stats) {
    const T top = rounded(of.peak), log_mass = V::load(of.log_mass), mean = V::load(of.mean);
    const int64_t rows = p.B * p.Q;
    put(to.stats, 0, V::add(top, log_mass));
    put(to.stats, rows, V::sub(log_mass, mean));
    put(to.stats, 2 * rows, V::where_less(zero, mass, V::add(top, mean), zero));
    put(to.stats, 3 * rows, V::load(of.variance));
    put(to.stats, 4 * rows, top);
  }
  const T top = V::where_less(V::set(neg_inf<A>()), peak, peak, zero);
  bool fine = V::reduce_sum(V::fma(top, zero, V::fma(mass, zero, V::fma(first, zero, V::mul(spread, zero))))) == 0;
  if (to.moment)
    for (int i = 0; i < n; ++i) fine &= write_moment<A>(p, to, row[i], moment + i * ldm, of.scale[i]);
  return fine;
}

}  // namespace PARTITA_ISA
}  // namespace partita
