// Backward: gradients of the row sums, scores recomputed tile by tile.
//
//   ds_ij = e_ij (g_mass + g_first (1 + c) + g_second (2 c + c^2) + <g_moment_i, value_j>) + g_target [j = target]
//
// A task is a range of rows against a range of keys. Rows are packed a chunk at a time; a key block then meets every
// row block of the chunk: products with keys and values, e and ds in cache, then e^T g_moment, ds^T query and ds key.
#pragma once
#include <cstdlib>

#include "kernels.h"
#include "scores.h"

namespace partita {
namespace PARTITA_ISA {

template <class A>
struct BackwardBlock {
  static constexpr int KEYS = (sizeof(A) == 4 ? 32 : 16) * Vec<A>::ROWS;  // whole register blocks and whole panels
  static constexpr int LD = KEYS + 16;
  static constexpr int TILES = Vec<A>::ROWS > 8 ? 5 : 8;  // of a row block
  static constexpr int ROWS = TILES * Vec<A>::ROWS;
  static constexpr int RUNS = KEYS / Shape<A>::PANEL;
  static constexpr int64_t CHUNK = 2048;  // rows packed at a time
};

template <class A>
struct BackwardCall {
  const PartitaProblem& p;
  const BackwardPlan& plan;
  const PartitaGradients& g;
  ScoreRule<A> sc;
  int64_t Dp, Vp;
  bool value, moments;  // g_moment given; g_first or g_second given
  bool need_query, need_key, need_value, key_lies;
  A* sum_key;     // (key_splits, B * Q, Dp): sum_j ds key_j, before the scale
  A* sum_row;     // (key_splits, B * Q): sum_j ds
  A* part_key;    // (row_splits, groups, K, D), or the result itself
  A* part_value;  // (row_splits, groups, K, V), or the result itself
  A* column;      // (2, padded K): peak and upstream gradient of the column sums, where there are any
  int64_t padded;
};

template <class A>
struct BackwardWorkspace {  // a thread's working memory
  // of a chunk of rows
  Row* row;
  KeySpan* span;  // of each tile
  A *peak, *c0, *c1, *c2, *target;
  A *query, *query_rows, *up, *up_rows;  // packed and row-major: query, and the upstream gradient of the moment
  // of a key block
  A *key, *key_rows, *val, *grad_key, *grad_value;
  // of a row block
  A *e, *ds, *tanhs, *temp;

  void lay_out(Arena& c, const BackwardCall<A>& call, int64_t rows) {
    constexpr int R = Shape<A>::ROWS, L = Shape<A>::LANES, KEYS = BackwardBlock<A>::KEYS, LD = BackwardBlock<A>::LD;
    const int64_t D = call.p.D, V = call.value ? call.p.V : 0, tiles = rows / R + 2;
    row = c.take<Row>(rows);
    span = c.take<KeySpan>(tiles);
    peak = c.take<A>(rows);
    c0 = c.take<A>(rows);
    c1 = c.take<A>(rows);
    c2 = c.take<A>(rows);
    target = c.take<A>(rows);
    query = c.take<A>(tiles * D * L);
    query_rows = c.take<A>(rows * call.Dp);
    up = c.take<A>(tiles * V * L);
    up_rows = c.take<A>(rows * call.Vp);
    key = c.take<A>(KEYS * D);
    key_rows = c.take<A>(call.need_query && !call.key_lies ? KEYS * call.Dp : 0);
    val = c.take<A>(KEYS * V);
    grad_key = c.take<A>(KEYS * call.Dp);
    grad_value = c.take<A>(KEYS * call.Vp);
    e = c.take<A>(BackwardBlock<A>::ROWS * LD);
    ds = c.take<A>(BackwardBlock<A>::ROWS * LD);
    tanhs = c.take<A>(call.sc.cap > 0 ? R * LD : 0);
    temp = c.take<A>(L * (D > V ? D : V) + KEYS + 16);
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
template <class A, bool MOMENTS, bool VALUE, bool COLUMNS = false>
PARTITA_INLINE void row_score_gradient(const BackwardWorkspace<A>& t, int64_t r, A* s, A* d, int begin, int end,
                                       ColumnRange unmasked) {
  using V = Vec<A>;
  const typename V::T m = V::set(t.peak[r]), k0 = V::set(t.c0[r]), k1 = V::set(t.c1[r]), k2 = V::set(t.c2[r]);
  int j = begin;
  for (; j < unmasked.begin; j += V::W)
    vector_score_gradient<A, true, MOMENTS, VALUE, COLUMNS>(s + j, d + j, m, k0, k1, k2);
  for (; j < unmasked.end; j += V::W)
    vector_score_gradient<A, false, MOMENTS, VALUE, COLUMNS>(s + j, d + j, m, k0, k1, k2);
  for (; j < end; j += V::W) vector_score_gradient<A, true, MOMENTS, VALUE, COLUMNS>(s + j, d + j, m, k0, k1, k2);
}

// The part of ds that comes from the column sums; the upstream gradient lies `padded` after the peak.
template <class A>
PARTITA_INLINE void column_score_gradient(const A* s, A* d, int begin, int end, const A* column, int64_t padded) {
  using V = Vec<A>;
  for (int j = begin; j < end; j += V::W) {
    const A* k = column + j;
    const typename V::T c = bounded<A>(V::sub(V::load(s + j), V::load(k)));
    V::store(d + j, V::mul(exp2_bounded<A>(c), V::load(k + padded)));
  }
}

template <class A>
inline void score_gradient(const BackwardCall<A>& call, const BackwardWorkspace<A>& t, int64_t r, A* s, A* d,
                           const VisibleColumns& c, ColumnRange unmasked, int64_t key) {
  if (call.column) {
    column_score_gradient<A>(s, d, c.begin, c.end, call.column + key, call.padded);
    row_score_gradient<A, false, false, true>(t, r, s, d, c.begin, c.end, unmasked);
  } else if (call.value) {
    call.moments ? row_score_gradient<A, true, true>(t, r, s, d, c.begin, c.end, unmasked)
                 : row_score_gradient<A, false, true>(t, r, s, d, c.begin, c.end, unmasked);
  } else {
    call.moments ? row_score_gradient<A, true, false>(t, r, s, d, c.begin, c.end, unmasked)
                 : row_score_gradient<A, false, false>(t, r, s, d, c.begin, c.end, unmasked);
  }
}

// What happens to one row of ds besides the products: target, bias gradients, softcap. Gives 0 * its sum: NaN tells.
template <class A>
inline A finish_score_gradient(const BackwardCall<A>& call, const Row& row, A g_target, int64_t split, int64_t key,
                               const VisibleColumns& c, A* d, const A* tanhs) {
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

// Tiles [first, last) of the `tiles` that the `rows` rows of a chunk are cut into.
struct TileRange {
  int64_t rows, tiles, first, last;
  int64_t row(int64_t tile) const { return rows * tile / tiles; }
};

template <class A>
struct BackwardKeys {  // a key block
  int64_t begin, end;
  const A* rows;  // row-major, from `begin` on
  int64_t stride;
};

// What the tiles of a row block see of a key block, together and each by itself.
template <class A>
struct BlockColumns {
  int begin = BackwardBlock<A>::KEYS, end = 0;
  int64_t last = 0;
  VisibleColumns tile[BackwardBlock<A>::TILES];
};

// e and ds of a row block against a key block, and what is visible of it. Gives 0 * a sum of ds: NaN tells.
template <class A>
inline A block_score_gradients(const BackwardCall<A>& call, BackwardWorkspace<A>& t, int64_t key_split,
                               const TileRange& range, const BackwardKeys<A>& keys, BlockColumns<A>& seen) {
  constexpr int LD = BackwardBlock<A>::LD, P = Shape<A>::PANEL, L = Shape<A>::LANES;
  const PartitaProblem& p = call.p;
  const int64_t base = range.row(range.first), key = keys.begin;
  A probe = 0;
  for (int64_t i = range.first; i < range.last; ++i) {
    const int64_t at = range.row(i);
    const int m = static_cast<int>(range.row(i + 1) - at);
    ColumnRange runs[BackwardBlock<A>::RUNS];
    VisibleColumns& c = seen.tile[i - range.first];
    c = visible_columns<A>(p, call.sc.masked, t.span[i], t.row + at, m, key, keys.end, runs);
    if (!c.runs) continue;
    A *s = t.e + (at - base) * LD, *d = t.ds + (at - base) * LD;
    for (int u = 0; u < c.runs; ++u) {
      const int64_t panels = (runs[u].end - runs[u].begin) / P;
      score<A, LD>(m, p.D, t.query + i * p.D * L, t.key + runs[u].begin * p.D, panels, s + runs[u].begin);
      if (call.value) score<A, LD>(m, p.V, t.up + i * p.V * L, t.val + runs[u].begin * p.V, panels, d + runs[u].begin);
      if (u)
        for (int r = 0; r < m; ++r)
          for (int j = runs[u - 1].end; j < runs[u].begin; ++j) d[r * LD + j] = 0;
    }
    if (!call.sc.plain || !c.whole) bias_and_mask<A, LD>(call.sc, t.row + at, m, key, c, runs, s, t.temp, t.tanhs);
    const ColumnRange unmasked = p.bias.data ? ColumnRange{c.end, c.end} : c.unmasked;  // a bias may hide any key
    const bool finish = call.g.target || call.g.bias_row || call.g.bias_col || call.g.bias.data || call.sc.cap > 0;
    for (int r = 0; r < m; ++r) {
      score_gradient<A>(call, t, at + r, s + r * LD, d + r * LD, c, unmasked, key);
      if (finish)
        probe += finish_score_gradient<A>(call, t.row[at + r], t.target[at + r], key_split, key, c, d + r * LD,
                                          t.tanhs + r * LD);
    }
    seen.begin = c.begin < seen.begin ? c.begin : seen.begin;
    seen.end = c.end > seen.end ? c.end : seen.end;
    seen.last = c.last > seen.last ? c.last : seen.last;
  }
  return probe;
}

// Tiles see different columns: the products run over all of them, with zeros where a tile has none.
template <class A>
inline void clear_unseen(BackwardWorkspace<A>& t, const TileRange& range, const BlockColumns<A>& seen) {
  constexpr int LD = BackwardBlock<A>::LD;
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
template <class A>
inline bool backward_block(const BackwardCall<A>& call, BackwardWorkspace<A>& t, int64_t key_split,
                           const TileRange& range, const BackwardKeys<A>& keys, bool& touched) {
  constexpr int LD = BackwardBlock<A>::LD, R = Shape<A>::ROWS;
  const PartitaProblem& p = call.p;
  const int64_t base = range.row(range.first), total = range.row(range.last) - base;
  BlockColumns<A> seen;
  const A probe = block_score_gradients<A>(call, t, key_split, range, keys, seen);
  if (seen.begin >= seen.end) return true;
  touched = true;
  clear_unseen<A>(t, range, seen);
  for (int64_t j = seen.begin; j < seen.last; j += R) {
    const int64_t m = seen.last - j < R ? seen.last - j : R;
    const auto add = [&](const A* left, const A* right, int64_t width, A* to) {
      accumulate<A, LD, 1>(m, total, left + j, right + base * width, width, width, to + j * width, width, nullptr);
    };
    if (call.need_value) add(t.e, t.up_rows, call.Vp, t.grad_value);
    if (call.need_key) add(t.ds, t.query_rows, call.Dp, t.grad_key);
  }
  if (call.need_query)
    for (int64_t i = range.first; i < range.last; ++i) {
      const VisibleColumns& c = seen.tile[i - range.first];
      if (!c.runs) continue;
      const int64_t at = range.row(i), m = range.row(i + 1) - at;
      // Rows of a tile may belong to several entries, whose sums do not lie next to each other.
      for (int64_t r = 0; r < m;) {
        int64_t n = 1;
        while (r + n < m && t.row[at + r + n].out == t.row[at + r].out + n) ++n;
        A* sum = call.sum_key + (key_split * p.B * p.Q + t.row[at + r].out) * call.Dp;
        accumulate<A, 1, LD>(n, c.last - c.begin, t.ds + (at + r - base) * LD + c.begin,
                             keys.rows + c.begin * keys.stride, keys.stride, call.Dp, sum, call.Dp, nullptr);
        r += n;
      }
    }
  return probe == 0;
}

}  // namespace PARTITA_ISA
}  // namespace partita
