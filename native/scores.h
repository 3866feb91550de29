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

// Rows of a task or chunk, and their queries as the register block reads them. What a product is multiplied by to be a
// score is part of the query, but for pairs, which would be rounded once more: there it is `factor`.
template <class F>
struct PackedRows {
  Row* row;
  KeySpan* span;  // of each tile
  Sum<F>* factor;
  F *query, *row_temp;  // row_temp: a tile of rows before they are packed

  void lay_out(Arena& c, int64_t rows, int64_t D, int64_t longest) {
    constexpr int L = Shape<F>::LANES;
    const int64_t tiles = rows / Shape<F>::ROWS + 2;
    row = c.take<Row>(rows);
    span = c.take<KeySpan>(tiles);
    factor = c.take<Sum<F>>(rows);
    query = c.take<F>(tiles * steps<F>(D) * L);
    row_temp = c.take<F>(steps<F>(longest) * L);
  }
};

// Packs tile i, rows [a, b).
template <class F>
inline void pack_queries(const ScoreRule<Sum<F>>& sc, const PackedRows<F>& t, int64_t i, int64_t a, int64_t b) {
  constexpr int W = Vec<F>::W, L = Shape<F>::LANES;
  const PartitaProblem& p = *sc.problem;
  const int64_t n = steps<F>(p.D), m = b - a;
  const Row* rows = t.row + a;
  F* to = t.query + i * n * L;
  t.span[i] = key_span(rows, m);
  for (int half = 0; half < L; half += W) {
    const F* at[W];
    Sum<F> factors[W];
    for (int i = 0; i < W; ++i) {
      const Row& row = rows[half + i < m ? half + i : m - 1];  // lanes past m are never read
      factors[i] = *row_at<Sum<F>>(p.scale, row.entry, row.index) * sc.query_factor;
      at[i] = row_steps<F>(view_of(p.query, p.dtype, row.entry, row.index), 0, p.D, t.row_temp + i * n);
    }
    if constexpr (Factor<F>::STEP > 1) {
      transpose_rows<F>(at, n, to + half, L);
      for (int i = 0; i < W && half + i < m; ++i) t.factor[a + half + i] = factors[i];
    } else {
      transpose_rows<F, true>(at, n, to + half, L, factors);
    }
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
        for (int j = runs[u - 1].end; j < runs[u].begin; ++j) {
          row[j] = neg_inf<A>();
          if (tanhs && sc.cap > 0)
            tanhs[r * LD + j] = 0;  // multiplied by 0 later, which a NaN left there would survive
        }
    }
  }
}

}  // namespace PARTITA_ISA
}  // namespace partita
