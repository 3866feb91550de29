// From the sums of a row, lane by lane and relative to its reference, to what a call gives: relative to the peak, in
// natural units, with the statistics and the mean value if they are asked for.
#pragma once
#include <initializer_list>

#include "online_softmax.h"

namespace partita {
namespace PARTITA_ISA {

// The sums of one row over all its keys, relative to its peak; the spread is about its mean.
template <class A>
struct RowTotal {
  A peak, mass, first, spread;
  A scale;                     // what the moment is multiplied by to be a mean, or relative to the peak
  A log_mass, mean, variance;  // of the scores less the peak, in natural units
};

template <class A>
struct RowTotals {  // of W rows
  alignas(64) A mass[Vec<A>::W];
  A first[Vec<A>::W], spread[Vec<A>::W], ratio[Vec<A>::W], scale[Vec<A>::W];  // ratio: from the reference to the peak
  A log_mass[Vec<A>::W], mean[Vec<A>::W], variance[Vec<A>::W];

  RowTotal<A> row(int i, A peak) const {
    return {peak, mass[i], first[i], spread[i], scale[i], log_mass[i], mean[i], variance[i]};
  }
};

// The sums of rows r, r + 1, ... (W of them, the last one repeated) over their lanes.
template <class A>
inline void sum_lanes(const RowStates<A>& t, int64_t r, int64_t rows, bool moments, bool mean, RowTotals<A>& to) {
  using V = Vec<A>;
  using T = typename V::T;
  const auto row = [&](int i) { return r + i < rows ? r + i : rows - 1; };
  const auto lanes = [&](const A* of, int i) { return V::load(of + row(i) * V::W); };
  const T zero = V::set(0), one = V::set(1), total = reduce_lanes<A, true>([&](int i) { return lanes(t.mass, i); });
  V::store(to.mass, total);
  for (A* x : {to.first, to.spread, to.log_mass, to.mean, to.variance}) V::store(x, zero);
  V::store(to.ratio, one);
  V::store(to.scale, mean ? V::where_less(zero, total, V::div(one, total), one) : one);
  if (!moments) return;
  const T linear = reduce_lanes<A, true>([&](int i) { return lanes(t.first, i); });
  alignas(64) A peaks[V::W], references[V::W], centres[V::W];
  for (int i = 0; i < V::W; ++i)
    peaks[i] = t.peak[row(i)], references[i] = t.reference[row(i)], centres[i] = t.centre[row(i)];
  const T reference = V::load(references), middle = V::add(reference, V::div(linear, total));
  // from the centre to the mean: what is taken off is small, since they are near each other
  const T about = recentre<A>(reduce_lanes<A, true>([&](int i) { return lanes(t.second, i); }), linear, total,
                              reference, V::load(centres), middle);
  // from the reference to the peak, whose own exponential is 1: rounding must not take the mass below it
  const T d = V::where_less(zero, total, V::sub(reference, V::load(peaks)), zero),
          ratio = exp2_bounded<A>(bounded<A>(d));
  const T mass = V::where_less(zero, total, V::max(one, V::mul(ratio, total)), total);
  const T first = V::mul(ratio, V::fma(d, total, linear)),
          spread = V::where_less(zero, total, V::max(zero, V::mul(ratio, about)), zero);
  const T ln2 = V::set(static_cast<A>(LN2)), by = V::where_less(zero, total, mass, one);  // sums of an empty row are 0
  V::store(to.mass, mass);
  V::store(to.first, first);
  V::store(to.spread, spread);
  V::store(to.ratio, ratio);
  V::store(to.log_mass, V::where_less(zero, total, log_above_one<A>(mass), zero));
  V::store(to.mean, V::div(V::mul(first, ln2), by));
  V::store(to.variance, V::div(V::mul(spread, V::mul(ln2, ln2)), by));
  if (!mean) V::store(to.scale, ratio);
}

// The ends of a row; the smallest score in base 2.
template <class A>
struct RowEnds {
  A least;
  int64_t argmax, argmin;
};

// One finished row, in natural units. The peak is given in double: backward must find the very number again that the
// sums are relative to.
template <class A>
inline bool write_row(const PartitaProblem& p, const PartitaSums& to, const Row& row, const RowTotal<A>& of,
                      const A* moment, int64_t count, int64_t rank, A target, const RowEnds<A>& ends) {
  using V = Vec<A>;
  const A ln2 = static_cast<A>(LN2), mass = of.mass, first = of.first * ln2, spread = of.spread * (ln2 * ln2);
  const double natural = static_cast<double>(of.peak) * LN2;
  const int64_t i = row.out;
  if (to.peak) static_cast<double*>(to.peak)[i] = natural;
  if (to.mass) static_cast<A*>(to.mass)[i] = mass;
  if (to.first) static_cast<A*>(to.first)[i] = first;
  if (to.second) static_cast<A*>(to.second)[i] = spread;
  if (to.count) static_cast<A*>(to.count)[i] = static_cast<A>(count);
  if (to.rank) to.rank[i] = rank;
  if (to.least) {
    static_cast<A*>(to.least)[i] = static_cast<A>(static_cast<double>(ends.least) * LN2);
    to.argmax[i] = ends.argmax;
    to.argmin[i] = ends.argmin;
  }
  if (to.target_score)
    static_cast<A*>(to.target_score)[i] = static_cast<A>(static_cast<double>(target) * LN2);  // rounds as the peak does
  if (to.stats) {
    A* out = static_cast<A*>(to.stats) + i;
    const int64_t rows = p.B * p.Q;
    const A top = static_cast<A>(natural);
    out[0] = top + of.log_mass;
    out[rows] = of.log_mass - of.mean;
    out[2 * rows] = mass > 0 ? top + of.mean : A(0);
    out[3 * rows] = of.variance;
    out[4 * rows] = top;
  }
  A probe = mass * 0 + first * 0 + spread * 0;
  if (of.peak > neg_inf<A>()) probe += of.peak * 0;
  if (to.moment) {
    A* out = static_cast<A*>(to.moment) + to.moment_offset[row.entry] + row.index * to.moment_row;
    const typename V::T zero = V::set(0), by = V::set(of.scale);
    typename V::T bad = zero;
    int64_t v = 0;
    for (; v + V::W <= p.V; v += V::W) {
      const typename V::T x = V::mul(V::load(moment + v), by);
      bad = V::fma(x, zero, bad);
      V::store(out + v, x);
    }
    probe += V::reduce_sum(bad);
    for (; v < p.V; ++v) probe += (out[v] = moment[v] * of.scale) * 0;
  }
  return probe == 0;
}

}  // namespace PARTITA_ISA
}  // namespace partita
