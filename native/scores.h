// A tile of scores: the rows of one register block against the keys of one key block.
//
// `bias_and_mask` turns products into scores in the rule's unit: softcap, bias, then -inf on what is invisible.
#pragma once
#include "mask.h"

namespace partita {
namespace PARTITA_ISA {

template <class A>
struct Block {  // sizes of a key block and of the score buffer
  static constexpr int KEYS = sizeof(A) == 4 ? (Vec<A>::ROWS > 8 ? 512 : 256) : (Vec<A>::ROWS > 8 ? 256 : 128);
  static constexpr int LD = KEYS + 16;  // not a power of two: rows would fall on the same cache sets
  static constexpr int RUNS = KEYS / Shape<A>::PANEL;
};

template <class A>
struct ScoreRule {  // what every tile of a call shares
  const PartitaProblem* problem;
  A unit;          // of a score: log2 e where powers of two are formed of it, 1 where scores are compared with numbers
  A query_factor;  // multiplies scale: the unit, or 1 / softcap
  A cap;           // softcap in the unit, 0 where absent
  bool plain;      // no softcap, no bias
  bool masked;     // segments or a mask: visibility is more than an interval
};

template <class A>
inline ScoreRule<A> make_score_rule(const PartitaProblem& p, double unit = LOG2E) {
  ScoreRule<A> s;
  s.unit = static_cast<A>(unit);
  s.problem = &p;
  s.query_factor = static_cast<A>(p.softcap > 0 ? 1.0 / p.softcap : unit);
  s.cap = static_cast<A>(p.softcap > 0 ? p.softcap * unit : 0.0);
  s.plain = !(p.softcap > 0) && !p.bias.data;
  s.masked = p.mask.data || p.query_segment.data;
  return s;
}

// The queries of m rows, times scale and fold, as the register block reads them; temp holds W of them.
template <class A>
inline void pack_queries(const ScoreRule<A>& sc, const Row* rows, int m, A* temp, A* to) {
  constexpr int W = Vec<A>::W, L = Shape<A>::LANES;
  const PartitaProblem& p = *sc.problem;
  const bool same = p.dtype == (sizeof(A) == 4 ? PARTITA_FLOAT32 : PARTITA_FLOAT64);
  for (int half = 0; half < L; half += W) {
    const A* at[W];
    A factor[W];
    for (int i = 0; i < W; ++i) {
      const Row& row = rows[half + i < m ? half + i : m - 1];  // lanes past m are never read
      const int64_t from = p.query.offset[row.entry] + row.index * p.query.row;
      factor[i] = *row_at<A>(p.scale, row.entry, row.index) * sc.query_factor;
      at[i] = same ? static_cast<const A*>(p.query.data) + from : temp + i * p.D;
      if (!same) convert_row<A>(p.query.data, from, p.dtype, p.D, p.D, A(1), temp + i * p.D);
    }
    transpose_rows<A, true>(at, p.D, to + half, L, factor);
  }
}

// The bias of one row for columns [begin, end) of the key block, in the unit, added to s. `temp` holds a key block.
template <class A>
inline void add_bias(const ScoreRule<A>& sc, const Row& row, int64_t key, int begin, int end, A* s, A* temp) {
  using V = Vec<A>;
  const PartitaProblem& p = *sc.problem;
  if (!p.bias.col) {
    const A b = element<A>(row.bias, 0, p.bias_dtype) * sc.unit;
    for (int j = begin; j < end; ++j) s[j] += b;
    return;
  }
  const int64_t stop = p.K - key < end ? p.K - key : end;
  convert_row<A>(row.bias, key + begin, p.bias_dtype, stop - begin, end - begin, A(1), temp + begin);
  for (int j = begin; j < end; j += V::W) V::store(s + j, V::fma(V::load(temp + j), V::set(sc.unit), V::load(s + j)));
}

// Products to scores, for m rows of one tile. With a softcap, `tanhs` (or null) receives tanh of the scaled products.
template <class A, int LD>
inline void bias_and_mask(const ScoreRule<A>& sc, const Row* rows, int m, int64_t key, const VisibleColumns& c,
                          const ColumnRange* runs, A* s, A* temp, A* tanhs) {
  using V = Vec<A>;
  for (int r = 0; r < m; ++r) {
    A* row = s + r * LD;
    for (int u = 0; u < c.runs; ++u) {
      if (sc.cap > 0) {
        for (int j = runs[u].begin; j < runs[u].end; j += V::W) {
          const typename V::T t = tanh<A>(V::load(row + j));
          if (tanhs) V::store(tanhs + r * LD + j, t);
          V::store(row + j, V::mul(t, V::set(sc.cap)));
        }
      }
      if (rows[r].bias) add_bias(sc, rows[r], key, runs[u].begin, runs[u].end, row, temp);
      if (!c.whole) mask_row(*sc.problem, rows[r], key, runs[u].begin, runs[u].end, row);
      if (u)
        for (int j = runs[u - 1].end; j < runs[u].begin; ++j) row[j] = neg_inf<A>();
    }
  }
}

}  // namespace PARTITA_ISA
}  // namespace partita
