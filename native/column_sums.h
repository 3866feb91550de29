// Column sums from the tiles of the row sums: for a symmetric loss the same product serves both.
//
//   mass_j = sum_i 2^(s_ij - peak_j)      over the rows that see key j
//
// Each task has its own sums over its rows; they are merged in the order of the tasks' rows.
#pragma once
#include "online_softmax.h"

namespace partita {
namespace PARTITA_ISA {

template <class A>
struct ColumnSums {  // of one task: K numbers each, padded to whole panels
  A *peak, *mass;
  ColumnSums(A* at, int64_t padded) : peak(at), mass(at + padded) {}
  void clear(int64_t padded) {
    for (int64_t j = 0; j < padded; ++j) peak[j] = neg_inf<A>(), mass[j] = 0;
  }
};

template <class A>
PARTITA_INLINE typename Vec<A>::T clamp_finite(typename Vec<A>::T x) {  // -inf becomes a huge negative number
  return Vec<A>::max(Vec<A>::set(sizeof(A) == 4 ? A(-1e38) : A(-1e300)), x);
}

// m rows of scores, columns [begin, end) of the key block at `key`.
template <class A, int LD>
inline void add_to_columns(const A* s, int m, int begin, int end, int64_t key, const ColumnSums<A>& to) {
  using V = Vec<A>;
  using T = typename V::T;
  for (int j = begin; j < end; j += V::W) {
    const int64_t at = key + j;
    const T old = V::load(to.peak + at);
    T top = old;
    for (int r = 0; r < m; ++r) top = V::max(V::load(s + r * LD + j), top);
    const T reference = clamp_finite<A>(top);
    T mass = V::mul(exp2_bounded<A>(bounded<A>(V::sub(old, reference))), V::load(to.mass + at));
    for (int r = 0; r < m; ++r)
      mass = V::add(mass, exp2_bounded<A>(bounded<A>(V::sub(V::load(s + r * LD + j), reference))));
    V::store(to.peak + at, top);
    V::store(to.mass + at, mass);
  }
}

// One finished column, in natural units; the peak in double, as for rows.
template <class A>
inline bool write_column(A* parts, int64_t row_blocks, int64_t padded, int64_t j, const PartitaSums& to) {
  A peak = neg_inf<A>(), mass = 0;
  for (int64_t i = 0; i < row_blocks; ++i) {
    const A top = parts[i * 2 * padded + j];
    peak = top > peak ? top : peak;
  }
  for (int64_t i = 0; i < row_blocks; ++i) {
    const ColumnSums<A> part(parts + i * 2 * padded, padded);
    if (part.peak[j] != neg_inf<A>()) mass += exp2_one<A>(part.peak[j] - peak) * part.mass[j];
  }
  static_cast<double*>(to.col_peak)[j] = static_cast<double>(peak) * LN2;
  static_cast<A*>(to.col_mass)[j] = mass;
  return (mass + (peak > neg_inf<A>() ? peak : A(0))) * 0 == 0;
}

}  // namespace PARTITA_ISA
}  // namespace partita
