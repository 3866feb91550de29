// Backward: gradients of the row sums, scores recomputed tile by tile.
//
//   ds_ij = e_ij (g_mass + g_first (1 + c) + g_second (2 c + c^2) + <g_moment_i, value_j>) + g_target [j = target]
//
// A task is a range of rows against a range of keys. Rows are packed a chunk at a time; a key block then meets every
// row block of the chunk: products with keys and values, e and ds in cache, then e^T g_moment, ds^T query and ds key.
// Where every row sees every key, all chunks pass over a span of keys before the next span is begun: what the keys
// receive is then finished a span at a time, and stays in cache until it is.
#pragma once
#include <cstdlib>

#include "kernels.h"
#include "scores.h"

namespace partita {
namespace PARTITA_ISA {

template <class F>
struct BackwardBlock {
  static constexpr bool PAIRS = Factor<F>::STEP > 1;
  static constexpr int KEYS = (sizeof(F) == 4 && !PAIRS ? 32 : 16) * Vec<F>::ROWS;  // whole register blocks and panels
  static constexpr int LD = KEYS + 16;
  static constexpr int TILES = (Vec<F>::ROWS > 8 ? 5 : 8) * (PAIRS ? 2 : 1);  // of a row block: inner sums of 70 steps
  static constexpr int ROWS = TILES * Vec<F>::ROWS;
  static constexpr int RUNS = KEYS / Shape<F>::PANEL;
  static constexpr int64_t CHUNK = 2048, LEAST = 512;  // rows packed at a time: fewer where they are long
  static constexpr int64_t CHUNK_BYTES = 2 << 20;
  static constexpr int64_t SPAN_BYTES = 4 << 20;  // of the gradient of a span of keys

  static int64_t chunk(int64_t dim, int64_t value_dim) {
    const int64_t width = steps<F>(dim) + steps<F>(value_dim);
    const int64_t fitting = CHUNK_BYTES / static_cast<int64_t>(sizeof(F)) / (width > 0 ? width : 1);
    return fitting < LEAST ? LEAST : fitting < CHUNK ? fitting / 2 * 2 : CHUNK;
  }
};

template <class F>
struct BackwardCall {
  using A = Sum<F>;
  const PartitaProblem& p;
  const BackwardPlan& plan;
  const PartitaGradients& g;
  ScoreRule<A> sc;
  int64_t Dp, Vp;
  bool value, moments;  // g_moment given; g_first or g_second given
  bool need_query, need_key, need_value, key_lies;
  bool query_lies;      // rows of queries are read where they are
  bool round_key;       // the gradient of a span of keys is rounded when it is finished
  int64_t chunk, span;  // rows packed at a time; keys that all rows pass over before the next ones, 0 for all
  A* sum_key;           // (B * Q, Dp), two of them in turn: sum_j ds key_j, before the scale
  A* sum_row;           // (key_splits, B * Q): sum_j ds
  A* sum_scale;         // (key_splits, B * Q): sum_j ds <query, key_j>; of pairs, since sum_key is of rounded ds
  A* part_key;          // (row_splits, groups, K, D), or the result itself
  A* part_value;        // (row_splits, groups, K, V), or the result itself
  A* column;            // (2, padded K): peak and upstream gradient of the column sums, where there are any
  int64_t padded;
};

template <class F>
struct BackwardWorkspace : PackedRows<F> {  // a thread's working memory
  using A = Sum<F>;
  // of a chunk of rows
  A *peak, *c0, *c1, *c2, *target, *scale, *ones;
  F *query_rows, *up, *up_rows;  // row-major query; the upstream gradient of the moment, packed and row-major
  const F* query_from;           // the rows of the chunk for the product over rows: a copy, or where they are
  int64_t query_step;
  A* query_sums;  // as `sum_key`, of the keys of this task
  // of a key block
  F *key, *key_rows, *val;
  A *grad_key, *grad_value;
  A* key_sums;  // of a span of keys, before they are rounded
  // of a row block
  A *e, *ds, *tanhs, *products, *temp;
  F* ds_keys;  // ds as the product with the keys takes it

  void lay_out(Arena& c, const BackwardCall<F>& call, int64_t rows) {
    constexpr int R = Shape<F>::ROWS, L = Shape<F>::LANES, KEYS = BackwardBlock<F>::KEYS, LD = BackwardBlock<F>::LD;
    constexpr bool pairs = Factor<F>::STEP > 1;
    const int64_t V = call.value ? call.p.V : 0, D = steps<F>(call.p.D), Vs = steps<F>(V), tiles = rows / R + 2;
    PackedRows<F>::lay_out(c, rows, call.p.D, call.p.D > call.Vp ? call.p.D : call.Vp);
    peak = c.take<A>(rows);
    c0 = c.take<A>(rows);
    c1 = c.take<A>(rows);
    c2 = c.take<A>(rows);
    target = c.take<A>(rows);
    scale = c.take<A>(rows);
    ones = c.take<A>(R);
    query_rows = c.take<F>(call.need_key && !call.query_lies ? steps<F>(rows) * call.Dp : 0);
    up = c.take<F>(tiles * Vs * L);
    up_rows = c.take<F>(steps<F>(rows) * call.Vp);
    key = c.take<F>(KEYS * D);
    key_rows = c.take<F>(call.need_query && !call.key_lies ? steps<F>(KEYS) * call.Dp : 0);
    val = c.take<F>(KEYS * Vs);
    grad_key = c.take<A>(KEYS * call.Dp);
    grad_value = c.take<A>(KEYS * call.Vp);
    key_sums = c.take<A>(call.round_key ? call.span * call.p.D : 0);
    e = c.take<A>(BackwardBlock<F>::ROWS * LD);
    ds = c.take<A>(BackwardBlock<F>::ROWS * LD);
    tanhs = c.take<A>(call.sc.cap > 0 ? R * LD : 0);
    products = c.take<A>(pairs && call.g.scale ? R * LD : 0);
    ds_keys = pairs ? c.take<F>(BackwardBlock<F>::ROWS * LD) : reinterpret_cast<F*>(ds);
    temp = c.take<A>(KEYS + call.p.D + call.Vp);
  }
};

// e and ds of one vector of a row in place of its scores and of <g_moment, value>.
template <class A, bool BOUND, bool MOMENTS, bool VALUE, bool COLUMNS>
PARTITA_INLINE void vector_score_gradient(A* s, A* d, typename Vec<A>::T peak, typename Vec<A>::T k0,
                                          typename Vec<A>::T k1, typename Vec<A>::T k2) {
  using V = Vec<A>;
  const typename V::T c = bounded_if<A, BOUND>(V::sub(V::load(s), peak)), e = exp2_bounded<A>(c);
  typename V::T h = VALUE ? V::add(V::load(d), k0) : k0;
  if (MOMENTS) h = V::fma(V::fma(k2, c, k1), c, h);
  V::store(s, e);
  V::store(d, COLUMNS ? V::fma(e, h, V::load(d)) : V::mul(e, h));
}

// The same for columns [begin, end) of a row, of which those in `unmasked` are not -inf.
template <class F, bool MOMENTS, bool VALUE, bool COLUMNS = false>
PARTITA_INLINE void row_score_gradient(const BackwardWorkspace<F>& t, int64_t r, Sum<F>* s, Sum<F>* d, int begin,
                                       int end, ColumnRange unmasked) {
  using A = Sum<F>;
  using V = Vec<A>;
  const typename V::T m = V::set(t.peak[r]), k0 = V::set(t.c0[r]), k1 = V::set(t.c1[r]), k2 = V::set(t.c2[r]);
  int j = begin;
  for (; j < unmasked.begin; j += V::W)
    vector_score_gradient<A, true, MOMENTS, VALUE, COLUMNS>(s + j, d + j, m, k0, k1, k2);
  for (; j < unmasked.end; j += V::W)
    vector_score_gradient<A, false, MOMENTS, VALUE, COLUMNS>(s + j, d + j, m, k0, k1, k2);
  for (; j < end; j += V::W) vector_score_gradient<A, true, MOMENTS, VALUE, COLUMNS>(s + j, d + j, m, k0, k1, k2);
}

// The part of ds that comes from the column sums; the upstream gradient is `padded` after the peak.
template <class A>
PARTITA_INLINE void column_score_gradient(const A* s, A* d, int begin, int end, const A* column, int64_t padded) {
  using V = Vec<A>;
  for (int j = begin; j < end; j += V::W) {
    const A* k = column + j;
    const typename V::T c = bounded<A>(V::sub(V::load(s + j), V::load(k)));
    V::store(d + j, V::mul(exp2_bounded<A>(c), V::load(k + padded)));
  }
}

template <class F>
inline void score_gradient(const BackwardCall<F>& call, const BackwardWorkspace<F>& t, int64_t r, Sum<F>* s, Sum<F>* d,
                           const VisibleColumns& c, ColumnRange unmasked, int64_t key) {
  if (call.column) {
    column_score_gradient<Sum<F>>(s, d, c.begin, c.end, call.column + key, call.padded);
    row_score_gradient<F, false, false, true>(t, r, s, d, c.begin, c.end, unmasked);
  } else if (call.value) {
    call.moments ? row_score_gradient<F, true, true>(t, r, s, d, c.begin, c.end, unmasked)
                 : row_score_gradient<F, false, true>(t, r, s, d, c.begin, c.end, unmasked);
  } else {
    call.moments ? row_score_gradient<F, true, false>(t, r, s, d, c.begin, c.end, unmasked)
                 : row_score_gradient<F, false, false>(t, r, s, d, c.begin, c.end, unmasked);
  }
}

// What happens to one row of ds after the products: target, bias gradients, softcap. Gives 0 * its sum, NaN where it is
// not finite.
template <class F>
inline Sum<F> finish_score_gradient(const BackwardCall<F>& call, const Row& row, Sum<F> g_target, int64_t split,
                                    int64_t key, const VisibleColumns& c, Sum<F>* d, const Sum<F>* tanhs) {
  using A = Sum<F>;
  using V = Vec<A>;
  const PartitaProblem& p = call.p;
  const PartitaGradients& g = call.g;
  const int64_t j = row.target - key;
  if (g.target && j >= c.begin && j < c.last && visible(p, row, row.target) &&
      !(row.bias && element<A>(row.bias, p.bias.col ? row.target : 0, p.bias_dtype) == neg_inf<A>()))
    d[j] += g_target;
  A probe = 0;
  if (g.bias_row || g.bias_col || g.bias.data) {
    typename V::T sum = V::set(0);
    for (int i = c.begin; i < c.end; i += V::W) sum = V::add(sum, V::load(d + i));
    const A total = V::reduce_sum(sum);
    probe = total * 0;
    if (g.bias_row) call.sum_row[split * p.B * p.Q + row.out] += total;
    if (g.bias_col) {
      A* to = static_cast<A*>(g.bias_col) + row.entry * p.K + key;
      for (int64_t i = c.begin; i < c.last; ++i) to[i] += d[i];
    }
    if (g.bias.data) {
      A* to = static_cast<A*>(g.bias.data) + g.bias.offset[row.entry] + row.index * g.bias.row + key;
      for (int64_t i = c.begin; i < c.last; ++i) to[i] += d[i];
    }
  }
  if (call.sc.cap > 0)
    for (int i = c.begin; i < c.end; i += V::W) {
      const typename V::T x = V::load(d + i), tx = V::mul(V::load(tanhs + i), x);
      V::store(d + i, V::sub(x, V::mul(V::load(tanhs + i), tx)));
    }
  return probe;
}

// The first row of a tile, of `tiles` that `rows` rows are cut into: a step of the products over rows begins there.
template <class F>
PARTITA_INLINE int64_t tile_row(int64_t rows, int64_t tile, int64_t tiles) {
  const int64_t at = steps<F>(rows * tile / tiles) * Factor<F>::STEP;
  return at < rows ? at : rows;
}

// Tiles [first, last) of the `tiles` that the `rows` rows of a chunk are cut into.
template <class F>
struct TileRange {
  int64_t rows, tiles, first, last;
  int64_t row(int64_t tile) const { return tile_row<F>(rows, tile, tiles); }
};

template <class F>
struct BackwardKeys {  // a key block
  int64_t begin, end;
  const F* rows;  // row-major, from `begin` on
  int64_t stride;
};

// What the tiles of a row block see of a key block, together and each by itself.
template <class F>
struct BlockColumns {
  int begin = BackwardBlock<F>::KEYS, end = 0;
  int64_t last = 0;
  VisibleColumns tile[BackwardBlock<F>::TILES];
};

// e and ds of m rows of a tile as their products take them, in place: nothing to do but for pairs.
//
// Both are rounded to bfloat16. For the products over rows, two neighbouring rows are one of pairs in the place of the
// first, ds times the scale of its row; for the product with the keys, ds of two neighbouring keys is a pair.
template <class F>
PARTITA_INLINE void round_tile(const BackwardCall<F>& call, const Sum<F>* scale, int m, const VisibleColumns& c,
                               Sum<F>* e, Sum<F>* ds, F* ds_keys) {
  if constexpr (Factor<F>::STEP > 1) {
    constexpr int LD = BackwardBlock<F>::LD;
    using V = Vec<Sum<F>>;
    for (int r = 0; r < m; r += 2) {
      const bool both = r + 1 < m;
      for (int64_t i = r; call.need_query && i < r + 1 + both; ++i)
        for (int j = c.begin; j < c.end; j += 2 * V::W)
          Vec<F>::store(ds_keys + i * LD + j / 2,
                        Vec<F>::round(V::load(ds + i * LD + j), V::load(ds + i * LD + j + V::W)));
      const auto zip = [&](Sum<F>* even, typename V::T a, typename V::T b) {
        for (int j = c.begin; j < c.end; j += V::W) {
          const typename V::T odd = both ? V::mul(V::load(even + LD + j), b) : V::set(0);
          Vec<F>::store(reinterpret_cast<F*>(even) + j, Vec<F>::zip(V::mul(V::load(even + j), a), odd));
        }
      };
      if (call.need_value) zip(e + r * LD, V::set(1), V::set(1));
      if (call.need_key) zip(ds + r * LD, V::set(scale[r]), both ? V::set(scale[r + 1]) : V::set(0));
    }
  }
}

// Products of row r of a tile are kept for the gradient of their scale, and become scores.
template <class F>
PARTITA_INLINE void scale_products(const BackwardWorkspace<F>& t, int r, int64_t row, const VisibleColumns& c,
                                   Sum<F>* s) {
  using V = Vec<Sum<F>>;
  Sum<F>* products = t.products + r * BackwardBlock<F>::LD;
  for (int j = c.begin; j < c.end; j += V::W) {
    const typename V::T x = V::load(s + j);
    V::store(products + j, x);
    V::store(s + j, V::mul(x, V::set(t.factor[row])));
  }
}

// e and ds of a row block against a key block, and what is visible of it. Gives 0 * a sum of ds: NaN tells.
template <class F>
inline Sum<F> block_score_gradients(const BackwardCall<F>& call, BackwardWorkspace<F>& t, int64_t key_split,
                                    const TileRange<F>& range, const BackwardKeys<F>& keys, BlockColumns<F>& seen) {
  using A = Sum<F>;
  constexpr int LD = BackwardBlock<F>::LD, P = Shape<F>::PANEL, L = Shape<F>::LANES;
  constexpr bool PAIRS = Factor<F>::STEP > 1;
  const PartitaProblem& p = call.p;
  const int64_t depth = steps<F>(p.D), width = steps<F>(p.V);
  const int64_t base = range.row(range.first), key = keys.begin;
  A probe = 0;
  for (int64_t i = range.first; i < range.last; ++i) {
    const int64_t at = range.row(i);
    const int m = static_cast<int>(range.row(i + 1) - at);
    ColumnRange runs[BackwardBlock<F>::RUNS];
    VisibleColumns& c = seen.tile[i - range.first];
    c = visible_columns<A>(p, call.sc.masked, t.span[i], t.row + at, m, key, keys.end, runs);
    if (!c.runs) continue;
    A *s = t.e + (at - base) * LD, *d = t.ds + (at - base) * LD;
    for (int u = 0; u < c.runs; ++u) {
      const int64_t panels = (runs[u].end - runs[u].begin) / P;
      score<F, LD>(m, depth, t.query + i * depth * L, t.key + runs[u].begin * depth, panels, s + runs[u].begin,
                   PAIRS && call.g.scale ? t.ones : t.factor + at);
      if (call.value)
        score<F, LD>(m, width, t.up + i * width * L, t.val + runs[u].begin * width, panels, d + runs[u].begin, t.ones);
      if (u)
        for (int r = 0; r < m; ++r)
          for (int j = runs[u - 1].end; j < runs[u].begin; ++j) s[r * LD + j] = d[r * LD + j] = 0;
    }
    if (PAIRS && call.g.scale)
      for (int r = 0; r < m; ++r) scale_products<F>(t, r, at + r, c, s + r * LD);
    if (!call.sc.plain || !c.whole) bias_and_mask<A, LD>(call.sc, t.row + at, m, key, c, runs, s, t.temp, t.tanhs);
    const ColumnRange unmasked = p.bias.data ? ColumnRange{c.end, c.end} : c.unmasked;  // a bias may hide any key
    const bool finish = call.g.target || call.g.bias_row || call.g.bias_col || call.g.bias.data || call.sc.cap > 0;
    for (int r = 0; r < m; ++r) {
      score_gradient<F>(call, t, at + r, s + r * LD, d + r * LD, c, unmasked, key);
      if (finish)
        probe += finish_score_gradient<F>(call, t.row[at + r], t.target[at + r], key_split, key, c, d + r * LD,
                                          t.tanhs + r * LD);
      if (PAIRS && call.g.scale) {
        typename Vec<A>::T sum = Vec<A>::set(0);
        for (int j = c.begin; j < c.end; j += Vec<A>::W)
          sum = Vec<A>::fma(Vec<A>::load(d + r * LD + j), Vec<A>::load(t.products + r * LD + j), sum);
        call.sum_scale[key_split * p.B * p.Q + t.row[at + r].out] += Vec<A>::reduce_sum(sum);
      }
    }
    round_tile<F>(call, t.scale + at, m, c, s, d, t.ds_keys + (at - base) * LD);
    seen.begin = c.begin < seen.begin ? c.begin : seen.begin;
    seen.end = c.end > seen.end ? c.end : seen.end;
    seen.last = c.last > seen.last ? c.last : seen.last;
  }
  return probe;
}

// Tiles see different columns: the products run over all of them, with zeros where a tile has none.
template <class F>
inline void clear_unseen(BackwardWorkspace<F>& t, const TileRange<F>& range, const BlockColumns<F>& seen) {
  constexpr int LD = BackwardBlock<F>::LD;
  const int64_t base = range.row(range.first);
  for (int64_t i = range.first; i < range.last; ++i) {
    const VisibleColumns& c = seen.tile[i - range.first];
    const int a = c.runs ? c.begin : seen.end, b = c.runs ? c.end : seen.end;
    if (a == seen.begin && b == seen.end) continue;
    for (int64_t r = range.row(i) - base; r < range.row(i + 1) - base; ++r) {
      for (int j = seen.begin; j < a; ++j) t.e[r * LD + j] = t.ds[r * LD + j] = 0;
      for (int j = b; j < seen.end; ++j) t.e[r * LD + j] = t.ds[r * LD + j] = 0;
    }
  }
}

// One row block against one key block: e and ds, then their products. False where a number is not finite.
template <class F>
inline bool backward_block(const BackwardCall<F>& call, BackwardWorkspace<F>& t, int64_t key_split,
                           const TileRange<F>& range, const BackwardKeys<F>& keys, bool& touched) {
  using A = Sum<F>;
  constexpr int LD = BackwardBlock<F>::LD, R = Shape<F>::ROWS, STEP = Factor<F>::STEP;
  const int64_t base = range.row(range.first), total = range.row(range.last) - base;
  BlockColumns<F> seen;
  const A probe = block_score_gradients<F>(call, t, key_split, range, keys, seen);
  if (seen.begin >= seen.end) return true;
  touched = true;
  clear_unseen<F>(t, range, seen);
  for (int64_t j = seen.begin; j < seen.last; j += R) {
    const int64_t m = seen.last - j < R ? seen.last - j : R;
    const auto add = [&](const A* left, const F* right, int64_t step, int64_t width, A* to) {
      accumulate<F, STEP * LD, 1>(m, steps<F>(total), reinterpret_cast<const F*>(left) + j, right + base / STEP * step,
                                  step, width, to + j * width, width, nullptr);
    };
    if (call.need_value) add(t.e, t.up_rows, call.Vp, call.Vp, t.grad_value);
    if (call.need_key) add(t.ds, t.query_from, t.query_step, call.Dp, t.grad_key);
  }
  if (call.need_query)
    for (int64_t i = range.first; i < range.last; ++i) {
      const VisibleColumns& c = seen.tile[i - range.first];
      if (!c.runs) continue;
      const int64_t at = range.row(i), m = range.row(i + 1) - at;
      // Rows of a tile may belong to several entries, whose sums are not next to each other.
      for (int64_t r = 0; r < m;) {
        int64_t n = 1;
        while (r + n < m && t.row[at + r + n].out == t.row[at + r].out + n) ++n;
        A* sum = t.query_sums + t.row[at + r].out * call.Dp;
        accumulate<F, 1, LD>(n, steps<F>(c.last - c.begin), t.ds_keys + (at + r - base) * LD + c.begin / STEP,
                             keys.rows + c.begin / STEP * keys.stride, keys.stride, call.Dp, sum, call.Dp, nullptr);
        r += n;
      }
    }
  return probe == 0;
}

}  // namespace PARTITA_ISA
}  // namespace partita
