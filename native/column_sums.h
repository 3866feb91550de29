// Column sums from the tiles of the row sums: for a symmetric loss the same product serves both.
//
//   mass_j = sum_i 2^(s_ij - peak_j), and first and second alike, over the rows that see key j
//
// Each task has its own sums over its rows; they are merged in the order of the tasks' rows.
#pragma once
#include "online_softmax.h"

namespace partita {
namespace PARTITA_ISA {

template <class A>
struct Columns {  // of one task: K numbers each, padded to whole panels
  A *peak, *mass, *first, *second;
  Columns(A* at, int64_t padded) : peak(at), mass(at + padded), first(at + 2 * padded), second(at + 3 * padded) {}
  void clear(int64_t padded) {
    for (int64_t j = 0; j < padded; ++j) peak[j] = neg_inf<A>();
    std::memset(mass, 0, sizeof(A) * static_cast<size_t>(3 * padded));
  }
};

template <class A>
PARTITA_INLINE typename Vec<A>::T finite(typename Vec<A>::T x) {  // -inf becomes a huge negative number
  return Vec<A>::max(Vec<A>::set(sizeof(A) == 4 ? A(-1e38) : A(-1e300)), x);
}

// m rows of scores, columns [begin, end) of the key block at `key`.
template <class A, int LD>
inline void add_columns(const A* s, int m, int begin, int end, int64_t key, const Columns<A>& to) {
  using V = Vec<A>;
  using T = typename V::T;
  for (int j = begin; j < end; j += V::W) {
    const int64_t at = key + j;
    const T old = V::load(to.peak + at);
    T top = old;
    for (int r = 0; r < m; ++r) top = V::max(V::load(s + r * LD + j), top);
    const T reference = finite<A>(top), d = bounded<A>(V::sub(old, reference)), ratio = exp2_bounded<A>(d);
    T mass = V::load(to.mass + at), first = V::load(to.first + at), second = V::load(to.second + at);
    second = V::mul(ratio, V::fma(d, V::fma(d, mass, V::add(first, first)), second));
    first = V::mul(ratio, V::fma(d, mass, first));
    mass = V::mul(ratio, mass);
    for (int r = 0; r < m; ++r) {
      const T c = bounded<A>(V::sub(V::load(s + r * LD + j), reference)), e = exp2_bounded<A>(c), ec = V::mul(e, c);
      mass = V::add(mass, e);
      first = V::add(first, ec);
      second = V::fma(ec, c, second);
    }
    V::store(to.peak + at, top);
    V::store(to.mass + at, mass);
    V::store(to.first + at, first);
    V::store(to.second + at, second);
  }
}

// One finished column, in natural units; the peak in double, as for rows.
template <class A>
inline bool finish_column(A* parts, int64_t pieces, int64_t padded, int64_t j, const PartitaSums& to) {
  A peak = neg_inf<A>(), mass = 0, first = 0, second = 0;
  for (int64_t i = 0; i < pieces; ++i) {
    const A top = parts[i * 4 * padded + j];
    peak = top > peak ? top : peak;
  }
  for (int64_t i = 0; i < pieces; ++i) {
    const Columns<A> part(parts + i * 4 * padded, padded);
    if (part.peak[j] == neg_inf<A>()) continue;
    const A d = part.peak[j] - peak;
    shift<A>(d, exp2_one<A>(d), part.mass + j, part.first + j, part.second + j, 1);
    mass += part.mass[j];
    first += part.first[j];
    second += part.second[j];
  }
  const A ln2 = static_cast<A>(LN2);
  static_cast<double*>(to.col_peak)[j] = static_cast<double>(peak) * LN2;
  static_cast<A*>(to.col_mass)[j] = mass;
  static_cast<A*>(to.col_first)[j] = first * ln2;
  static_cast<A*>(to.col_second)[j] = second * ln2 * ln2;
  return (mass + first + second + (peak > neg_inf<A>() ? peak : A(0))) * 0 == 0;
}

}  // namespace PARTITA_ISA
}  // namespace partita
