// The scores of some rows of one entry against all keys they see, register tile by register tile: for what needs the
// scores themselves, once more, and no products after them.
#pragma once
#include <cstdlib>

#include "kernels.h"
#include "scores.h"

namespace partita {
namespace PARTITA_ISA {

constexpr int64_t ROW_CHUNK = 1024;  // rows packed at a time

template <class A>
struct TileWorkspace {  // a thread's working memory
  Row* row;
  KeySpan* span;  // of each tile
  A *query, *score, *temp, *panel;

  void lay_out(Arena& c, int64_t rows, int64_t D) {
    constexpr int W = Vec<A>::W, R = Shape<A>::ROWS, L = Shape<A>::LANES, KEYS = Block<A>::KEYS;
    row = c.take<Row>(rows);
    span = c.take<KeySpan>(rows / R + 2);
    query = c.take<A>((rows / R + 2) * D * L);
    score = c.take<A>(R * Block<A>::LD);
    temp = c.take<A>(L * D + 2 * KEYS + W);
    panel = c.take<A>(KEYS * D);
  }
};

// Rows [at, at + m) of the chunk against columns [c.begin, c.end) of the key block that begins at `key`; tile number i.
struct Tile {
  int64_t i, at, key;
  int m;
  VisibleColumns c;
};

// Rows [first, first + n) of an entry, at most a chunk of them. `visit` gets each tile that sees something, its scores
// in t.score; `leave` the first key of a key block and its end, when all tiles have seen it.
template <class A, class Visit, class Leave>
inline void visit_tiles(const PartitaProblem& p, const ScoreRule<A>& sc, int64_t entry, int64_t first, int64_t n,
                        TileWorkspace<A>& t, const Visit& visit, const Leave& leave) {
  constexpr int KEYS = Block<A>::KEYS, P = Shape<A>::PANEL, L = Shape<A>::LANES, R = Shape<A>::ROWS, LD = Block<A>::LD;
  const int64_t tiles = (n + R - 1) / R;
  KeySpan seen;
  for (int64_t i = 0; i < tiles; ++i) {
    const int64_t a = n * i / tiles, b = n * (i + 1) / tiles;
    for (int64_t r = a; r < b; ++r) t.row[r] = make_row(p, entry, first + r);
    t.span[i] = key_span(t.row + a, b - a);
    seen.add(t.span[i]);
    pack_queries<A>(sc, t.row + a, static_cast<int>(b - a), t.temp, t.query + i * p.D * L);
  }
  const int64_t bytes = static_cast<int64_t>(dtype_size(p.dtype));
  const RowView keys{static_cast<const char*>(p.key.data) + p.key.offset[entry] * bytes, p.key.row, p.dtype};
  for (int64_t key = seen.lo / KEYS * KEYS; key < seen.hi; key += KEYS) {
    const int64_t end = key + KEYS < p.K ? key + KEYS : p.K, used = end < seen.hi ? end : seen.hi;
    pack_panels<A>(keys, p.K, p.D, key / P, (used + P - 1) / P, t.panel, t.temp);
    for (int64_t i = 0; i < tiles; ++i) {
      Tile tile;
      tile.i = i;
      tile.at = n * i / tiles;
      tile.key = key;
      tile.m = static_cast<int>(n * (i + 1) / tiles - tile.at);
      ColumnRange runs[Block<A>::RUNS];
      const Row* rows = t.row + tile.at;
      tile.c = visible_columns<A>(p, sc.masked, t.span[i], rows, tile.m, key, end, runs);
      for (int u = 0; u < tile.c.runs; ++u)
        score<A, LD>(tile.m, p.D, t.query + i * p.D * L, t.panel + runs[u].begin * p.D,
                     (runs[u].end - runs[u].begin) / P, t.score + runs[u].begin);
      if (!tile.c.runs) continue;
      if (!sc.plain || !tile.c.whole)
        bias_and_mask<A, LD>(sc, rows, tile.m, key, tile.c, runs, t.score, t.temp, nullptr);
      visit(tile);
    }
    leave(key, end);
  }
}

// How many parts the rows of each entry are cut into, so that every thread has a few.
template <class A>
inline int64_t row_cuts(const PartitaProblem& p) {
  const int64_t threads = p.threads > 1 ? p.threads : 1, few = (4 * threads + p.B - 1) / p.B,
                most = p.Q / (4 * Shape<A>::ROWS);
  return few < most ? few : most > 1 ? most : 1;
}

}  // namespace PARTITA_ISA
}  // namespace partita
